"""A method by its name and what a device can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput, Infeasible
from strata.core.sizes import parse_bytes
from strata.execution import Execution, scratch_bytes
from strata.methods.budget import Budget
from strata.methods.registry import method_class
from strata.planning.choosing import Ceilings
from strata.planning.reserve import check_reserve, reserving

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.methods.base import Method


def class_of(method: Method | str | type[Method]) -> type[Method]:
    if isinstance(method, str):
        return method_class(method)
    return method if isinstance(method, type) else type(method)


def method_named(
    name: str | type[Method],
    graph: ChannelGraph,
    *,
    constraints: Sequence[float] = (),
    budgets: Sequence[int | str] = (),
    execution: Execution | None = None,
    rounds: int = 500,
    seed: int = 0,
    accounting: str | None = None,
    model_name: str | None = None,
    lean: bool = False,
    ceilings: Ceilings | None = None,
    reserve: str | None = None,
    pretrained: bool = False,
    **options: Any,
) -> Method:
    """`constraints` are width ratios, `budgets` bytes; several are levels of devices. `lean`: executed in the
    cheapest way that fits. `pretrained`: the weights are trained ones, which auto keeps. `options`: those of the
    method's card. A class may stand in for its name."""
    method = class_of(name)
    check_levels(name, constraints, budgets)
    own = method.card.options
    unknown = sorted(set(options) - set(own))
    if unknown:
        there_are = f"its options are {', '.join(own)}" if own else "it has none"
        raise BadInput(f"{method.name} has no option {', '.join(unknown)}: {there_are}")
    budget = Budget(
        execution or Execution(),
        constraints=tuple(constraints),
        sizes=tuple(parse_bytes(size) for size in budgets),
        rounds=rounds,
        seed=seed,
        accounting=accounting,
        options=options,
        model_name=model_name,
        lean=lean,
        ceilings=ceilings or Ceilings(),
        reserve=reserve,
        pretrained=pretrained,
    )
    check_reserve(reserve, budget.sizes, accounting)
    if reserve is None or method.card.needs_plan:  # a plan does it itself, for its steps
        return _made(method, graph, budget)

    def with_scratch(cut: Cut, execution: Execution | None) -> int:
        own = execution or budget.execution
        return budget.chooser(graph).memory(cut, own).total + scratch_bytes(graph, cut, own)

    return reserving(
        budget.sizes,
        lambda sizes: _made(method, graph, replace(budget, sizes=sizes)),
        lambda made: made.most_executed(with_scratch),
    )


def _made(method: type[Method], graph: ChannelGraph, budget: Budget) -> Method:
    """A refusal names the ways that would fit."""
    try:
        return method.from_budget(graph, budget).executed(budget)
    except Infeasible as error:
        if method.name != "auto":
            name_ways(error, graph, budget)
        raise


def name_ways(error: Infeasible, graph: ChannelGraph, budget: Budget) -> None:
    """A refusal for bytes says which ways fit them."""
    if budget.sizes:
        from strata.methods.fitting import what_fits

        error.args = (f"{str(error).rstrip('.')}; {what_fits(graph, budget)}",)


def check_levels(
    name: str | type[Method], constraints: Sequence[float], budgets: Sequence[int | str], needed: bool = True
) -> None:
    """`needed` False: what devices can hold may still be unknown, as before a fleet of real ones has reported."""
    method = class_of(name)
    if constraints and budgets:
        raise BadInput("give either a constraint or a budget, not both")
    if needed and method.needs_budget and not (constraints or budgets):
        share = "" if method.name == "auto" else "a constraint, such as 0.25, or "
        raise BadInput(f"{method.name} needs to know what a device can hold: give {share}a budget, such as 24MiB")
