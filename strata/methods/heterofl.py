"""HeteroFL: each device trains the first channels of every layer, as many as its own level allows.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021: I_k^(e) = {i : 0 <= i < floor(s_e M_k)}, the same in every round.

Channels beyond the largest device's would never be trained, so the server's model is the largest device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.methods.base import Levels
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class HeteroFL(Levels):
    card = Card(
        "heterofl",
        label="HeteroFL",
        colour="#cf4d76",
        trains="the first channels, as many as the device's level allows",
        evaluates="the largest device's model",
        levels="each device its own width",
        paper="Diao et al., HeteroFL: Computation and Communication Efficient FL for Heterogeneous Clients, ICLR 2021",
    )

    def server_cut(self) -> Cut:
        return self.prefixes[max(self.constraints)]

    def cut_for(self, round: int, device: int) -> Cut:
        return self.prefixes[self.scale(device)]
