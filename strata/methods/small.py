"""Small model: all devices train, and the server evaluates, the narrow model that the weakest device can hold.

The baseline of Pfeiffer et al., "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023: I_k = {i : 0 <= i < floor(s M_k)}, the same in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.methods.base import Levels

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class Small(Levels):
    name = "small"

    def server_cut(self) -> Cut:
        return self.prefixes[min(self.constraints)]

    def cut_for(self, round: int, device: int) -> Cut:
        return self.server_cut()
