"""Which of a round's secure sums stand out. The server sees no update, but it sees several sums, over devices that were
put together at random: their means differ by chance alone, and a device that changes its own by more shows.

With three or more, the distance of each mean from their median (by coordinate) is held against the usual one among
them: means of groups and a median over these, as in Chen, Su and Xu, "Distributed Statistical Machine Learning in
Adversarial Settings", 2017. As long as fewer than half of the sums are bad, the median lies among the good ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

STANDS_OUT = 3.0  # times the usual distance
APART = 1.0  # two means: times the smaller one


def standing_out(means: Sequence[NDArray[np.float64]], rounding: float) -> dict[int, str]:
    """By their place, why they should not be used. `rounding`: what a value may be off by for want of precision."""
    if len(means) < 2:
        return {}
    slack = rounding * float(np.sqrt(means[0].size))
    if len(means) == 2:
        return _larger_of(means[0], means[1], slack)
    middle = np.median(np.stack(means), axis=0)
    distances = [float(np.linalg.norm(mean - middle)) for mean in means]
    usual = median_low(distances)
    return {
        place: f"it is {distance / max(usual, slack):.3g} times as far from the others as is usual among them"
        for place, distance in enumerate(distances)
        if distance > STANDS_OUT * usual + slack
    }


def _larger_of(first: NDArray[np.float64], second: NDArray[np.float64], slack: float) -> dict[int, str]:
    """Of two nobody knows which is the bad one: the smaller does less harm."""
    sizes = [float(np.linalg.norm(mean)) for mean in (first, second)]
    if float(np.linalg.norm(first - second)) <= APART * min(sizes) + slack:
        return {}
    return {sizes.index(max(sizes)): "it is far from the only other one, and the larger of the two"}
