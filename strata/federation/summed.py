"""What a round is told where the server sees sums of updates only: of each device that it is in one, and the sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from strata.federation.aggregation import Aggregate, RunningMean
from strata.federation.privacy import PrivateSum

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class SumOfChanges:
    """Over so many devices, which all trained the same cut. `loss`: the mean of theirs, where it was summed too."""

    devices: int
    changes: dict[str, Tensor]  # float64, in the cut's shapes
    loss: float | None = None

    def add_to(self, mean: Aggregate, cut: Cut) -> None:
        if not isinstance(mean, RunningMean | PrivateSum):
            raise TypeError(f"{type(mean).__name__} needs every device's own update, and there is their sum only")
        mean.add_sum(cut, self.changes, self.devices)


@dataclass(frozen=True)
class Summed:
    """A device's update is in a sum; `total` with the first device of each sum, None with the others.

    `lost`: why there is no sum, though the device did its work. `times`: that it did it, where its first sums came to
    nothing.
    """

    peak_bytes: int = 0
    total: SumOfChanges | None = None
    lost: str | None = None
    times: int = 1
