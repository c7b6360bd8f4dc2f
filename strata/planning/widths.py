"""Budgets in bytes for methods that scale width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata.core.errors import Infeasible

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

GRID = 1000  # scales are multiples of 0.001, as in a Plan


def largest_scale(
    graph: ChannelGraph,
    budget: int,
    batch_size: int,
    accounting: str = "peak",
    measured: Callable[[Cut], int] | None = None,
    micro_batch: int | None = None,
    proximal: bool = False,
) -> float:
    """The largest width ratio whose prefix model trains within `budget` bytes: the constraint that the bytes mean.
    `measured` replaces the accounting where that does not know how devices train."""
    from strata.execution import memory

    def need(point: int) -> int:
        cut = graph.prefix(point / GRID)
        if measured:
            return measured(cut)
        return memory(graph, cut, batch_size, accounting, micro_batch=micro_batch, proximal=proximal).total

    def fits(point: int) -> bool:
        return need(point) <= budget

    if fits(GRID):
        return 1.0
    if not fits(1):
        least = need(1)
        raise Infeasible(
            f"even one channel per layer needs {least} bytes by {'measured' if measured else accounting} accounting at "
            f"batch {batch_size}, "
            f"{least - budget} more than the budget of {budget}: raise the budget or lower the batch size"
        )
    low, high = 1, GRID  # fits(low), not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low / GRID
