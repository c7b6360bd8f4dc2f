"""auto: whatever `strata fit` recommends within the budget. It becomes that method where it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.methods.base import Method
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.methods.budget import Budget


class Auto(Method):
    needs_budget = True
    card = Card(
        "auto",
        trains="as `strata fit` recommends within the budget: one of the methods above",
        evaluates="as that method",
        levels="as that method",
    )

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Any:
        from strata.methods.fitting import recommended
        from strata.methods.registry import method_class

        if not budget.sizes:
            raise BadInput("auto chooses by bytes: give a budget, such as 6.5MiB, not a constraint")
        lean = replace(budget, lean=True)
        chosen = recommended(graph, lean).method
        return method_class(chosen).from_budget(graph, lean).executed(lean)
