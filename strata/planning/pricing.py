"""What a configuration of one model costs under one execution, or by the cheapest of several; remembered, as the search
asks often."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from strata.execution import flops, traffic
from strata.planning.choosing import Chooser
from strata.planning.search import Bytes, distinct_scales

if TYPE_CHECKING:
    from strata.execution import Execution, Memory
    from strata.graph import ChannelGraph, Cut


class Pricing:
    """`chooser`: over further executions, where each configuration may have its own."""

    def __init__(
        self, graph: ChannelGraph, execution: Execution, accounting: str, chooser: Chooser | None = None
    ) -> None:
        self.graph, self.execution, self.accounting = graph, execution, accounting
        self.chooser = chooser or Chooser(graph, (execution,), accounting)
        self.depth = graph.depth
        self.scales = distinct_scales(graph.widths)
        self.cut = cache(graph.slt)

    def bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        """The fewest in which it trains."""
        return self.chooser.least(self.cut(k_frozen, k_trained, scale))

    def within(self, budget: int) -> Bytes:
        """For a search, which only asks whether it fits: where one of several executions does, none of the others
        need be counted."""
        if len(self.chooser.executions) == 1:
            return self.bytes
        return lambda *where: 0 if self.chooser.fits(self.cut(*where), budget) else budget + 1

    def execution_of(self, k_frozen: int, k_trained: int, scale: float, budget: int) -> Execution:
        """The cheapest within the budget; the one that was asked for, where none is."""
        if len(self.chooser.executions) == 1:
            return self.execution
        return self.chooser.fitting(self.cut(k_frozen, k_trained, scale), budget) or self.execution

    def memory(self, k_frozen: int, k_trained: int, scale: float, execution: Execution | None = None) -> Memory:
        return self.chooser.memory(self.cut(k_frozen, k_trained, scale), execution or self.execution)

    def of_cut(self, cut: Cut) -> Memory:
        return self.chooser.memory(cut, self.execution)

    def of_width(self, constraint: float) -> int:
        """What the width-scaled model of this ratio needs: a constraint in bytes."""
        return self.of_cut(self.graph.prefix(constraint)).total

    def trained_parameters(self, k_frozen: int, k_trained: int, scale: float) -> int:
        cut = self.cut(k_frozen, k_trained, scale)
        return sum(prod(cut.shapes[name]) for name in cut.trained)

    def upload_bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return traffic(self.graph, self.cut(k_frozen, k_trained, scale)).upload

    def train_flops(self, k_frozen: int, k_trained: int, scale: float, execution: Execution | None = None) -> int:
        return flops(self.graph, self.cut(k_frozen, k_trained, scale), execution or self.execution).real_train

    def by(self, execution: Execution) -> Pricing:
        """The same model, executed otherwise."""
        return Pricing(self.graph, execution, self.accounting)
