"""FedAvg: every device trains the whole model.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

With heterogeneous levels this is the exclusion baseline: only devices that can hold the full model take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from strata.core.errors import Infeasible
from strata.core.sizes import show_bytes, show_exactly
from strata.methods.base import Levels
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.methods.budget import Budget


@dataclass(frozen=True)
class FedAvg(Levels):
    needs_budget = False
    card = Card(
        "fedavg",
        label="FedAvg",
        colour="#64708a",
        trains="the whole model",
        evaluates="the whole model",
        levels="only devices that can hold the whole model take part",
        paper="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.constraints) < 1:
            raise Infeasible(
                f"fedavg trains the full model, and no device can hold it: the largest constraint is "
                f"{max(self.constraints):g}; give some devices constraint 1, or choose slt or small"
            )

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        most = max(budget.sizes, default=None)
        if most is not None and (need := budget.need(graph, graph.full())) > most:
            how = None if budget.lean else budget.execution.activation_checkpointing
            recomputed = "" if how is None else f" with activation checkpointing {how}"
            raise Infeasible(
                f"fedavg trains the full model, and no device can hold it: it needs {show_exactly(need)}"
                f"{recomputed}, {show_bytes(need - most)} more than the largest budget of {show_bytes(most)}"
            )
        return super().from_budget(graph, budget)

    def can_train(self, device: int) -> bool:
        return self.scale(device) == 1

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.full()
