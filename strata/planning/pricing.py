"""What a configuration of one model costs under one execution; remembered, as the search asks often."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from strata.execution import flops, memory, traffic
from strata.planning.search import distinct_scales

if TYPE_CHECKING:
    from strata.execution import Execution, Memory
    from strata.graph import ChannelGraph, Cut


class Pricing:
    def __init__(self, graph: ChannelGraph, execution: Execution, accounting: str) -> None:
        self.graph, self.execution, self.accounting = graph, execution, accounting
        self.depth = graph.depth
        self.scales = distinct_scales(graph.widths)
        self.cut = cache(graph.slt)
        self.memory = cache(self._memory)

    def bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return self.memory(k_frozen, k_trained, scale).total

    def of_cut(self, cut: Cut) -> Memory:
        return memory(self.graph, cut, self.execution, self.accounting)

    def of_width(self, constraint: float) -> int:
        """What the width-scaled model of this ratio needs: a constraint in bytes."""
        return self.of_cut(self.graph.prefix(constraint)).total

    def trained_parameters(self, k_frozen: int, k_trained: int, scale: float) -> int:
        cut = self.cut(k_frozen, k_trained, scale)
        return sum(prod(cut.shapes[name]) for name in cut.trained)

    def upload_bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return traffic(self.graph, self.cut(k_frozen, k_trained, scale)).upload

    def train_flops(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return flops(self.graph, self.cut(k_frozen, k_trained, scale), self.execution).real_train

    def by(self, execution: Execution) -> Pricing:
        """The same model, executed otherwise."""
        return Pricing(self.graph, execution, self.accounting)

    def _memory(self, k_frozen: int, k_trained: int, scale: float) -> Memory:
        return self.of_cut(self.cut(k_frozen, k_trained, scale))
