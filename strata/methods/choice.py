"""A method by its name and what a device can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.methods import Method
    from strata.training import LocalTraining

OF_PLANS = ("schedule", "patience", "head_fraction")  # what only methods that need a plan (slt) look at
OF_SOME = ("variant", "pool")  # what only methods look at that name it among their options


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
        measured = partial(
            measured_bytes, Workspace(graph), settings=training
        )  # the closed form knows nothing of segments
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


def refuse_unused(given: Mapping[str, Any], methods: Sequence[str], budgets_follow: bool = False) -> None:
    """Says which of the fields of Request that were `given` on the command line none of these methods would look at.

    For new runs only: what a folder's run was started with is not given anew. `budgets_follow`: from real devices.
    """
    for name in methods:
        check_name(name)
    these = " or ".join(methods)
    for field in (*OF_PLANS, *OF_SOME):
        users = [m.name for m in METHODS.values() if (m.needs_plan if field in OF_PLANS else field in m.options)]
        if field in given and not set(users) & set(methods):
            option = f"--{field.replace('_', '-')}"
            raise BadInput(f"{option} is for the method {' or '.join(users)}, not for {these}: leave it out")
    counted = "constraints" not in given and (budgets_follow or "budgets" in given)
    if "accounting" in given and not counted and not any(METHODS[name].needs_plan for name in methods):
        raise BadInput(
            f"--accounting says how the bytes of a budget are counted, and {these} has none here: leave it out, or "
            "give a --budget, such as 24MiB"
        )
    if "patience" in given and given.get("schedule") != "early-stopping":
        raise BadInput("--patience is for --schedule early-stopping: give that too, or leave it out")
    if "server_momentum" in given and given.get("server_optimizer", "none") == "none":
        raise BadInput(
            "--server-momentum is for --server-optimizer momentum or adam: give one of them, or leave it out"
        )
    if "stragglers" in given and "deadline" not in given:
        raise BadInput("--stragglers matter only where they can come too late: give a --deadline, such as 2, as well")
