"""Top: each device trains as many of the uppermost layers as it can hold; the others are frozen, as they came.

As weak devices do in Lee et al., "Embracing Federated Learning: Enabling Weak Client Participation via Partial Model
Training", IEEE Transactions on Mobile Computing 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from strata.methods.base import Method
from strata.methods.card import Card
from strata.methods.windows import fewest_frozen

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.methods.budget import Budget


@dataclass(frozen=True)
class Top(Method):
    needs_budget = True
    card = Card(
        "top",
        label="top layers",
        colour="#4f9d3a",
        trains="the uppermost layers, as many as fit; the others stay as they are",
        evaluates="the whole model",
        levels="each device as many layers as it can hold",
        paper="Lee et al., Embracing FL: Enabling Weak Client Participation via Partial Model Training, TMC 2024",
        for_pretrained=True,
    )
    frozen: tuple[int, ...] = (0,)  # layers, of each level of devices

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        sizes = budget.limits(graph)
        found = {size: fewest_frozen(cls.name, graph, budget, size) for size in set(sizes)}
        return cls(graph, tuple(found[size] for size in sizes))

    @property
    def setting(self) -> str:
        depth = self.graph.depth
        if min(self.frozen) == depth:
            return "the classifier alone"
        return f"top {', '.join(str(depth - k) for k in dict.fromkeys(self.frozen))} of {depth} layers"

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        return [count(self.cut_for(0, level)) for level in range(len(self.frozen))]

    @property
    def period(self) -> int | None:
        return len(self.frozen)

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.window(self.frozen[device % len(self.frozen)], self.graph.depth)
