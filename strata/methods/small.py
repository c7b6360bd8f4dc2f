"""Small model: all devices train, and the server evaluates, the narrow model that the weakest device can hold.

The baseline of Pfeiffer et al., "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023: I_k = {i : 0 <= i < floor(s M_k)}, the same in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.methods.base import Levels
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class Small(Levels):
    card = Card(
        "small",
        label="small model",
        colour="#2f7ab8",
        trains="the same narrow model on all devices",
        evaluates="the narrow model",
        levels="all use the weakest device's width",
        paper="baseline of Pfeiffer et al., NeurIPS 2023",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "constraints", (min(self.constraints),) * len(self.constraints))

    def server_cut(self) -> Cut:
        return self.prefixes[self.constraints[0]]

    def cut_for(self, round: int, device: int) -> Cut:
        return self.server_cut()
