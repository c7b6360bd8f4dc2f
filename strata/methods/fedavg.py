"""FedAvg: every device trains the whole model.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

With heterogeneous levels this is the exclusion baseline: only devices that can hold the full model take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.core.errors import Infeasible
from strata.methods.base import Levels

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class FedAvg(Levels):
    name = "fedavg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.constraints) < 1:
            raise Infeasible(
                f"fedavg trains the full model, and no device can hold it: the largest constraint is "
                f"{max(self.constraints):g}; give some devices constraint 1, or choose slt or small"
            )

    def can_train(self, device: int) -> bool:
        return self.scale(device) == 1

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.full()
