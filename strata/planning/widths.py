"""Budgets in bytes for methods that scale width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.core.errors import Infeasible
from strata.execution import memory

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph

GRID = 1000  # scales are multiples of 0.001, as in a Plan


def largest_scale(graph: ChannelGraph, budget: int, execution: Execution, accounting: str = "peak") -> float:
    """The largest width ratio whose prefix model trains within `budget` bytes: the constraint that the bytes mean."""

    def need(point: int) -> int:
        return memory(graph, graph.prefix(point / GRID), execution, accounting).total

    def fits(point: int) -> bool:
        return need(point) <= budget

    if fits(GRID):
        return 1.0
    if not fits(1):
        least = need(1)
        raise Infeasible(
            f"even one channel per layer needs {least} bytes by {accounting} accounting at batch "
            f"{execution.batch_size}, {least - budget} more than the budget of {budget}: raise the budget or lower the "
            "batch size"
        )
    low, high = 1, GRID  # fits(low), not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low / GRID
