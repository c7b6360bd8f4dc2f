"""From a budget to steps: for every step the widest head that fits, found by bisection over distinct channel counts.

Everything here sees the model only through `memory(k_frozen, k_trained, scale) -> bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

Bytes = Callable[[int, int, float], int]


@dataclass(frozen=True)
class Configuration:
    """Layers 1..k_frozen frozen, up to k_trained trained at full width, the rest a head of width `scale`."""

    k_frozen: int
    k_trained: int
    scale: float


def distinct_scales(widths: Iterable[int]) -> tuple[float, ...]:
    """Ascending: of all multiples of 0.001 that keep the same channels of every width, the largest. Ends in 1.0."""
    sorted_widths = sorted(set(widths))
    last: dict[tuple[int, ...], int] = {}
    for thousandths in range(1, 1001):
        last[tuple(max(1, thousandths * width // 1000) for width in sorted_widths)] = thousandths
    return tuple(thousandths / 1000 for thousandths in last.values())


def search(memory: Bytes, depth: int, scales: Sequence[float], budget: int) -> tuple[Configuration, ...] | None:
    """Steps 0..N, or None where nothing fits. One step at scale 1 where the whole model does."""
    if memory(0, 0, 1.0) <= budget:
        return (Configuration(0, 0, 1.0),)
    last = next((n for n in range(1, depth + 1) if memory(n - 1, n, 1.0) <= budget), None)
    if last is None:
        return None
    steps = [Configuration(last - 1, last, 1.0)]
    index = len(scales) - 1
    for n in range(last - 1, 0, -1):  # the last step first: s_n may not exceed s_{n+1}

        def fits(i: int, n: int = n) -> bool:
            # s_0 = s_1, so the width of step 1 has to suit the pre-training too.
            return memory(n - 1, n, scales[i]) <= budget and (n > 1 or memory(0, 0, scales[i]) <= budget)

        found = last_fitting(fits, index)
        if found is None:
            return None
        index = found
        steps.append(Configuration(n - 1, n, scales[index]))
    steps.append(Configuration(0, 0, steps[-1].scale))
    return tuple(reversed(steps))


def last_fitting(fits: Callable[[int], bool], upper: int) -> int | None:
    """The largest index <= upper that fits (all below it do). Neighbouring steps are alike, so gallop from upper."""
    if fits(upper):
        return upper
    too_wide, stride = upper, 1
    while True:
        low = max(0, too_wide - stride)
        if too_wide == 0:
            return None
        if fits(low):
            break
        too_wide, stride = low, stride * 2
    while too_wide - low > 1:
        middle = (low + too_wide) // 2
        low, too_wide = (middle, too_wide) if fits(middle) else (low, middle)
    return low


def smallest_frozen(memory: Bytes, step: Configuration, budget: int) -> int:
    """The fewest frozen layers with which this step still fits; with step.k_frozen of them it is known to."""
    spare = last_fitting(lambda i: memory(step.k_frozen - i, step.k_trained, step.scale) <= budget, upper=step.k_frozen)
    return step.k_frozen - (spare or 0)


def with_narrower_head(
    memory: Bytes, steps: Sequence[Configuration], scales: Sequence[float], budget: int, head_fraction: float
) -> tuple[Configuration, ...]:
    """The ablation of width against depth: before the last step use head_fraction of each scale, and spend what that
    leaves on fewer frozen layers."""
    changed = []
    for step in steps[:-1]:
        thousandths = max(1, int(head_fraction * round(1000 * step.scale) + 1e-9))
        # of equal channel counts `scales` holds the largest, so the next one up keeps the channels of this many
        narrow = replace(step, scale=next(s for s in scales if 1000 * s > thousandths - 0.5))
        changed.append(replace(narrow, k_frozen=smallest_frozen(memory, narrow, budget)))
    return (*changed, steps[-1])
