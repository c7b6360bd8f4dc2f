"""HeteroFL: each device trains the first channels of every layer, as many as its own level allows.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021: I_k^(e) = {i : 0 <= i < floor(s_e M_k)}, the same in every round.

Channels beyond the largest device's would never be trained, so the server's model is the largest device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.methods.base import Levels

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class HeteroFL(Levels):
    name = "heterofl"

    def server_cut(self) -> Cut:
        return self.prefixes[max(self.constraints)]

    def cut_for(self, round: int, device: int) -> Cut:
        return self.prefixes[self.scale(device)]
