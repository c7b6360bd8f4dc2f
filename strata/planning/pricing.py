"""What a configuration of one model costs at one batch size: the costs room with a memory, as the search asks often."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from strata import execution as costs
from strata.planning.search import distinct_scales

if TYPE_CHECKING:
    from strata.execution import Memory
    from strata.graph import ChannelGraph, Cut


class Pricing:
    def __init__(
        self,
        graph: ChannelGraph,
        batch_size: int,
        accounting: str,
        micro_batch: int | None = None,
        proximal: bool = False,
    ) -> None:
        self.graph, self.batch_size, self.accounting, self.micro_batch = graph, batch_size, accounting, micro_batch
        self.proximal = proximal
        self.depth = graph.depth
        self.scales = distinct_scales(graph.widths)
        self.cut = cache(graph.slt)
        self.memory = cache(self._memory)

    def bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return self.memory(k_frozen, k_trained, scale).total

    def of_cut(self, cut: Cut) -> Memory:
        return costs.memory(
            self.graph, cut, self.batch_size, self.accounting, micro_batch=self.micro_batch, proximal=self.proximal
        )

    def of_width(self, constraint: float) -> int:
        """What the width-scaled model of this ratio needs: a constraint in bytes."""
        return self.of_cut(self.graph.prefix(constraint)).total

    def trained_parameters(self, k_frozen: int, k_trained: int, scale: float) -> int:
        cut = self.cut(k_frozen, k_trained, scale)
        return sum(prod(cut.shapes[name]) for name in cut.trained)

    def upload_bytes(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return costs.traffic(self.graph, self.cut(k_frozen, k_trained, scale)).upload

    def train_flops(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return costs.flops(self.graph, self.cut(k_frozen, k_trained, scale)).real_train

    def at_batch(self, batch_size: int, micro_batch: int | None = None) -> Pricing:
        return Pricing(self.graph, batch_size, self.accounting, micro_batch, self.proximal)

    def _memory(self, k_frozen: int, k_trained: int, scale: float) -> Memory:
        return self.of_cut(self.cut(k_frozen, k_trained, scale))
