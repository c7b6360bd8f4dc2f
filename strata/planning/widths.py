"""Budgets in bytes for methods that scale width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.core.errors import Infeasible
from strata.planning.choosing import Chooser

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph

GRID = 1000  # scales are multiples of 0.001, as in a Plan


def largest_scale(graph: ChannelGraph, budget: int, execution: Execution, accounting: str = "peak") -> float:
    """The largest width ratio whose prefix model trains within `budget` bytes: the constraint that the bytes mean."""
    return widest(Chooser(graph, (execution,), accounting), budget)


def widest(chooser: Chooser, budget: int) -> float:
    """The same over several executions."""
    graph = chooser.graph

    def fits(point: int) -> bool:
        return chooser.fits(graph.prefix(point / GRID), budget)

    if fits(GRID):
        return 1.0
    if not fits(1):
        least = chooser.least(graph.prefix(1 / GRID))
        if least <= budget:
            raise Infeasible(f"even one channel per layer is above the ceiling of {chooser.ceilings}")
        raise Infeasible(
            f"even one channel per layer needs {least} bytes by {chooser.accounting} accounting at batch "
            f"{chooser.executions[0].batch_size}, {least - budget} more than the budget of {budget}"
        )
    low, high = 1, GRID  # fits(low), not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low / GRID
