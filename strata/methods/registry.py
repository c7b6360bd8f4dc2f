"""Methods by name: what `--method` accepts, what `strata methods` lists, and where users add their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from strata.core.errors import BadInput
from strata.core.importing import find
from strata.methods.auto import Auto
from strata.methods.base import Method
from strata.methods.bias import Bias
from strata.methods.cycle import Cycle
from strata.methods.fd import FD
from strata.methods.fedavg import FedAvg
from strata.methods.fedrolex import FedRolex
from strata.methods.fjord import FjORD
from strata.methods.heterofl import HeteroFL
from strata.methods.lora import Lora
from strata.methods.slt import SLT
from strata.methods.small import Small
from strata.methods.top import Top
from strata.methods.window import Window

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.planning import Plan

AnyMethod = TypeVar("AnyMethod", bound=type[Method])

METHODS: dict[str, type[Method]] = {}


def register(method: AnyMethod) -> AnyMethod:
    """Adds a method under its card's name. Also good as a decorator of the class."""
    name = method.card.name
    known = METHODS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):
        raise BadInput(f"there is already a method named {name!r}: choose another name")
    METHODS[name] = method  # the same one again: its file was imported under another name, or anew
    return method


register(SLT)
register(FedAvg)
register(Small)
register(FD)
register(FedRolex)
register(HeteroFL)
register(FjORD)
register(Top)
register(Window)
register(Cycle)
register(Bias)
register(Lora)


def method_class(name: str) -> type[Method]:
    """By its name here, or by where it is: `package.module:Class`."""
    if name == Auto.name:
        return Auto
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        known = ", ".join(METHODS)
        raise BadInput(
            f"there is no method {name!r}: choose one of {known} or auto, or give your own as package.module:Class"
        )
    found = find(name, "method", "package.module:Class, such as mypkg.methods:Mine", purpose="to train by")
    if not isinstance(found, type) or not issubclass(found, Method):
        raise BadInput(f"{name!r} is not a method: a subclass of strata.methods.Method")
    return found


def create(
    name: str,
    graph: ChannelGraph,
    *,
    constraints: Sequence[float] = (1.0,),
    plan: Plan | None = None,
    seed: int = 0,
    **options: Any,
) -> Method:
    """The method of this name. slt takes its budget from `plan`, the others theirs from `constraints`."""
    method = method_class(name)
    card = method.card
    known = () if card.needs_plan else tuple(card.options)  # a plan says the rest
    unknown = sorted(set(options) - set(known))
    if unknown:
        there_are = f"its options are {', '.join(known)}" if known else "it has none"
        raise BadInput(f"{name} has no option {', '.join(unknown)}: {there_are}")
    if card.needs_plan:
        if plan is None:
            raise BadInput(f"{name} needs a plan: strata.plan(model, ...) makes one from a budget or a constraint")
        return method(plan=plan)  # type: ignore[call-arg]
    return method.made(graph, seed, tuple(constraints), options)
