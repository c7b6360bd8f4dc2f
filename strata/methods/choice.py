"""A method by its name and what a device can hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput, Infeasible
from strata.core.sizes import parse_bytes
from strata.execution import state_bytes
from strata.methods import METHODS, create
from strata.planning import plan
from strata.planning.schedules import DEFAULT_PATIENCE
from strata.planning.widths import largest_scale
from strata.training.memory import measured_bytes

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.methods import Method
    from strata.training import LocalTraining


def method_named(
    name: str,
    graph: ChannelGraph,
    *,
    constraints: Sequence[float] = (),
    budgets: Sequence[int | str] = (),
    batch_size: int = 32,
    micro_batch: int | None = None,
    rounds: int = 500,
    seed: int = 0,
    accounting: str | None = None,
    schedule: str = "cumulative",
    head_fraction: float = 1.0,
    patience: int = DEFAULT_PATIENCE,
    model_name: str | None = None,
    training: LocalTraining | None = None,
    **options: Any,
) -> Method:
    """`constraints` are width ratios, `budgets` bytes; several are levels of devices. slt makes its plan from them, the
    others take the widest model that fits: with activation checkpointing in `training`, by measured bytes."""
    check_levels(name, constraints, budgets)
    proximal = training is not None and training.proximal > 0
    if METHODS[name].needs_plan:
        levels: dict[str, Any] = {"budget": list(budgets)} if budgets else {"constraint": list(constraints)}
        made = plan(
            graph, graph.input_shape, batch_size, **levels, rounds=rounds, accounting=accounting, schedule=schedule,
            head_fraction=head_fraction, patience=patience, name=model_name, micro_batch=micro_batch,
            proximal=proximal,
        )  # fmt: skip
        return create(name, graph, plan=made, **options)
    sizes = [parse_bytes(budget) for budget in budgets]
    measured = None
    if sizes and training is not None and training.activation_checkpointing is not None and accounting is None:
        measured = partial(measured_bytes, graph, settings=training)  # the closed form knows nothing of segments
        if name == "fedavg" and (need := measured(graph.full())) > max(sizes):
            raise Infeasible(
                f"fedavg trains the full model, which needs {need} bytes with activation checkpointing "
                f"{training.activation_checkpointing} (measured), {need - max(sizes)} more than the largest budget of "
                f"{max(sizes)}: give a larger budget or a micro-batch, or choose slt or small"
            )
    found: dict[int, float] = {}
    inner = 0  # bytes of the smaller levels, which a device of FjORD keeps beside its own
    for size in sorted(set(sizes)):
        room = size - inner
        found[size] = largest_scale(graph, room, batch_size, accounting or "peak", measured, micro_batch, proximal)
        inner += state_bytes(graph, graph.prefix(found[size])) if name == "fjord" else 0
    scales = tuple(constraints) or tuple(found[size] for size in sizes)
    return create(name, graph, constraints=scales or (1.0,), seed=seed, **options)


def check_levels(name: str, constraints: Sequence[float], budgets: Sequence[int | str], needed: bool = True) -> None:
    """`needed` False: what devices can hold may still be unknown, as before a fleet of real ones has reported."""
    check_name(name)
    if constraints and budgets:
        raise BadInput("give either a constraint or a budget, not both")
    if needed and not (constraints or budgets) and name != "fedavg":
        raise BadInput(
            f"{name} needs to know what a device can hold: give a constraint, such as 0.25, or a budget, such as 24MiB"
        )


def check_name(name: str) -> None:
    if name not in METHODS:
        raise BadInput(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")
