"""Budgets in bytes for methods that scale width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.errors import Infeasible

if TYPE_CHECKING:
    from strata.cutting import ChannelGraph

GRID = 1000  # scales are multiples of 0.001, as in a Plan


def largest_scale(graph: ChannelGraph, budget: int, batch_size: int, accounting: str = "peak") -> float:
    """The largest width ratio whose prefix model trains within `budget` bytes: the constraint that the bytes mean."""
    from strata.costs import memory

    def fits(point: int) -> bool:
        cut = graph.prefix(point / GRID)
        return memory(graph, cut, batch_size, accounting=accounting).total <= budget

    if fits(GRID):
        return 1.0
    if not fits(1):
        least = memory(graph, graph.prefix(1 / GRID), batch_size, accounting=accounting).total
        raise Infeasible(
            f"even one channel per layer needs {least} bytes by {accounting} accounting at batch {batch_size}, "
            f"{least - budget} more than the budget of {budget}: raise the budget or lower the batch size"
        )
    low, high = 1, GRID  # fits(low), not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low / GRID
