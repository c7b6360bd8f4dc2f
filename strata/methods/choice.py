"""A method by its name and what a device can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.sizes import parse_bytes
from strata.methods.budget import Budget, Steps
from strata.methods.registry import METHODS, method_class

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.methods.base import Method


def options_of(methods: Sequence[type[Method]]) -> tuple[str, ...]:
    """What some of these methods look at and others do not. A run has one seed for all."""
    names = (name for method in methods for name in method.card.options if name != "seed")
    return tuple(dict.fromkeys(names))


OF_PLANS = options_of([method for method in METHODS.values() if method.card.needs_plan])
OF_SOME = options_of([method for method in METHODS.values() if not method.card.needs_plan])


@dataclass(frozen=True)
class PlainSteps:
    """Where nothing more is known of how devices train."""

    batch_size: int = 32
    micro_batch: int | None = None
    activation_checkpointing: int | str | None = None
    proximal: float = 0.0


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
    batch_size: int = 32,
    micro_batch: int | None = None,
    rounds: int = 500,
    seed: int = 0,
    accounting: str | None = None,
    model_name: str | None = None,
    training: Steps | None = None,
    **options: Any,
) -> Method:
    """`constraints` are width ratios, `budgets` bytes; several are levels of devices. `options`: those of the method's
    card count; what only plans look at may be given to all. A class may stand in for its name."""
    method = class_of(name)
    check_levels(name, constraints, budgets)
    own = method.card.options
    unknown = sorted(set(options) - set(own) - set(OF_PLANS))
    if unknown:
        there_are = f"its options are {', '.join(own)}" if own else "it has none"
        raise BadInput(f"{method.name} has no option {', '.join(unknown)}: {there_are}")
    budget = Budget(
        training or PlainSteps(batch_size, micro_batch),
        constraints=tuple(constraints),
        sizes=tuple(parse_bytes(size) for size in budgets),
        rounds=rounds,
        seed=seed,
        accounting=accounting,
        options={option: value for option, value in options.items() if option in own},
        model_name=model_name,
    )
    return method.from_budget(graph, budget)


def check_levels(
    name: str | type[Method], constraints: Sequence[float], budgets: Sequence[int | str], needed: bool = True
) -> None:
    """`needed` False: what devices can hold may still be unknown, as before a fleet of real ones has reported."""
    method = class_of(name)
    if constraints and budgets:
        raise BadInput("give either a constraint or a budget, not both")
    if needed and method.needs_budget and not (constraints or budgets):
        raise BadInput(
            f"{method.name} needs to know what a device can hold: give a constraint, such as 0.25, or a budget, such "
            "as 24MiB"
        )


def refuse_unused(given: Mapping[str, Any], methods: Sequence[str], budgets_follow: bool = False) -> None:
    """Says which of the fields of Request that were `given` on the command line none of these methods would look at.

    For new runs only: what a folder's run was started with is not given anew. `budgets_follow`: from real devices.
    """
    classes = [method_class(name) for name in methods]
    these = " or ".join(methods)
    asked = {option for method in classes for option in method.card.options}
    for field in (*OF_PLANS, *OF_SOME):
        if field in given and field not in asked:
            users = [method.name for method in METHODS.values() if field in method.card.options]
            option = f"--{field.replace('_', '-')}"
            raise BadInput(f"{option} is for the method {' or '.join(users)}, not for {these}: leave it out")
    counted = "constraints" not in given and (budgets_follow or "budgets" in given)
    if "accounting" in given and not counted and not any(method.card.needs_plan for method in classes):
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
