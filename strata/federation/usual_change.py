"""A bound that follows the changes seen: what is many times as large as usual is refused.

Sizes are root mean squares over the trained values, so that devices with small and large cuts compare. All that came
count, also what was refused: where honest changes grow (another step, another learning rate), the bound follows soon,
and a minority does not move a median. Until there are a few, updates wait for the others of their round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from strata.graph import Cut

WINDOW = 32  # updates that are remembered
ENOUGH = 8  # to know what is usual, without waiting for more


class UsualChange:
    """`factor` times the median is the bound; `seen` are the latest sizes, the oldest first."""

    def __init__(self, factor: float, seen: tuple[float, ...] = ()) -> None:
        self.factor, self.seen = factor, seen

    def note(self, size: float) -> None:
        self.seen = (*self.seen, size)[-WINDOW:]

    @property
    def known(self) -> bool:
        return len(self.seen) >= ENOUGH

    def problem(self, size: float) -> str | None:
        usual = median_low(self.seen)
        if usual == 0 or size <= self.factor * usual:
            return None
        return f"its change is {size / usual:.3g} times the usual one, above the bound of {self.factor:g}"


def change_size(cut: Cut, sent: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> float:
    received = cut.extract(state)
    squares = sum(float((sent[name].double() - received[name].double()).square().sum()) for name in cut.trained)
    return math.sqrt(squares / max(1, sum(math.prod(cut.shapes[name]) for name in cut.trained)))
