"""Methods by name: what `--method` accepts, what `strata methods` lists, and where users add their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.methods.base import Method
from strata.methods.fd import FD
from strata.methods.fedavg import FedAvg
from strata.methods.fedrolex import FedRolex
from strata.methods.fjord import FjORD
from strata.methods.heterofl import HeteroFL
from strata.methods.slt import SLT
from strata.methods.small import Small

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.planning import Plan


@dataclass(frozen=True)
class Entry:
    name: str
    trains: str  # what a device trains, in one line
    evaluates: str
    levels: str  # heterogeneous devices
    paper: str
    make: Callable[..., Method]
    options: tuple[str, ...] = ()  # keywords of `create` beyond constraints and seed
    needs_plan: bool = False


METHODS: dict[str, Entry] = {}


def register(entry: Entry) -> None:
    """Add a method under a new name."""
    if entry.name in METHODS:
        raise BadInput(f"there is already a method named {entry.name!r}: choose another name")
    METHODS[entry.name] = entry


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
    if name not in METHODS:
        raise BadInput(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")
    entry = METHODS[name]
    unknown = sorted(set(options) - set(entry.options))
    if unknown:
        known = f"its options are {', '.join(entry.options)}" if entry.options else "it has none"
        raise BadInput(f"{name} has no option {', '.join(unknown)}: {known}")
    if entry.needs_plan:
        if plan is None:
            raise BadInput(f"{name} needs a plan: strata.plan(model, ...) makes one from a budget or a constraint")
        return entry.make(plan=plan, **options)
    if "seed" in entry.options:
        options.setdefault("seed", seed)
    return entry.make(graph=graph, constraints=tuple(constraints), **options)


for _entry in (
    Entry(
        "slt", "one layer after another at full width, with the layers below frozen and a thin head above",
        "the current submodel", "weakest fixes the head's width, stronger devices freeze fewer layers",
        "Pfeiffer et al., Aggregating Capacity in FL through Successive Layer Training, NeurIPS 2023",
        SLT, needs_plan=True,
    ),
    Entry(
        "fedavg", "the whole model", "the whole model", "only devices that can hold the whole model take part",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
        FedAvg,
    ),
    Entry(
        "small", "the same narrow model on all devices", "the narrow model", "all use the weakest device's width",
        "baseline of Pfeiffer et al., NeurIPS 2023", Small,
    ),
    Entry(
        "fd", "random channels, drawn per device and round", "the whole model", "each device its own width",
        "Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, 2018",
        FD, options=("seed", "variant", "pool"),
    ),
    Entry(
        "fedrolex", "a window of channels that rolls on each round", "the whole model", "each device its own width",
        "Alam et al., FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction, NeurIPS 2022", FedRolex,
    ),
    Entry(
        "heterofl", "the first channels, as many as the device's level allows", "the largest device's model",
        "each device its own width",
        "Diao et al., HeteroFL: Computation and Communication Efficient FL for Heterogeneous Clients, ICLR 2021",
        HeteroFL,
    ),
    Entry(
        "fjord", "the first channels, at a level drawn per mini-batch among those the device can hold",
        "the largest device's model", "each device all levels up to its own",
        "Horvath et al., FjORD: Fair and Accurate FL under heterogeneous targets with Ordered Dropout, NeurIPS 2021",
        FjORD,
    ),
):  # fmt: skip
    register(_entry)
