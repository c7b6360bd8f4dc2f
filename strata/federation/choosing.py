"""A method by its name and what a device can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata.errors import BadInput
from strata.methods import METHODS, create
from strata.methods.budgets import largest_scale
from strata.planning import plan
from strata.planning.schedules import DEFAULT_PATIENCE
from strata.sizes import parse_bytes

if TYPE_CHECKING:
    from strata.cutting import ChannelGraph
    from strata.methods import Method


def method_named(
    name: str,
    graph: ChannelGraph,
    *,
    constraints: Sequence[float] = (),
    budgets: Sequence[int | str] = (),
    batch_size: int = 32,
    rounds: int = 500,
    seed: int = 0,
    accounting: str | None = None,
    schedule: str = "cumulative",
    head_fraction: float = 1.0,
    patience: int = DEFAULT_PATIENCE,
    model_name: str | None = None,
    **options: Any,
) -> Method:
    """`constraints` are width ratios, `budgets` bytes; several are levels of devices. slt makes its plan from them, the
    others take the widest model that fits."""
    check_levels(name, constraints, budgets)
    if METHODS[name].needs_plan:
        levels: dict[str, Any] = {"budget": list(budgets)} if budgets else {"constraint": list(constraints)}
        made = plan(
            graph, graph.input_shape, batch_size, **levels, rounds=rounds, accounting=accounting, schedule=schedule,
            head_fraction=head_fraction, patience=patience, name=model_name,
        )  # fmt: skip
        return create(name, graph, plan=made, **options)
    scales = tuple(constraints) or tuple(
        largest_scale(graph, parse_bytes(budget), batch_size, accounting or "peak") for budget in budgets
    )
    return create(name, graph, constraints=scales or (1.0,), seed=seed, **options)


def check_levels(name: str, constraints: Sequence[float], budgets: Sequence[int | str], needed: bool = True) -> None:
    """`needed` False: what devices can hold may still be unknown, as before a fleet of real ones has reported."""
    if name not in METHODS:
        raise BadInput(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")
    if constraints and budgets:
        raise BadInput("give either a constraint or a budget, not both")
    if needed and not (constraints or budgets) and name != "fedavg":
        raise BadInput(
            f"{name} needs to know what a device can hold: give a constraint, such as 0.25, or a budget, such as 24MiB"
        )
