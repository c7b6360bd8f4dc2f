"""FedRolex: all devices train the same window of channels, which rolls on by one channel a round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022:
I_k^(r) = {r^, ..., r^ + floor(s M_k) - 1} mod M_k with r^ = r mod M_k. Every channel is trained equally often.
The full model is evaluated. Devices of different levels use their own s_e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.methods.base import Levels
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class FedRolex(Levels):
    card = Card(
        "fedrolex",
        label="FedRolex",
        colour="#8a63c7",
        trains="a window of channels that rolls on each round",
        evaluates="the whole model",
        levels="each device its own width",
        paper="Alam et al., FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction, NeurIPS 2022",
    )

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.rolling(self.scale(device), round)
