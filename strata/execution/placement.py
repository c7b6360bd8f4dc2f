"""Where to cut a submodel's forward pass for activation checkpointing: the places that leave the lowest peak.

A segment is a run of operations [p, q) of the training graph. Backward goes through it with these bytes: the inputs of
all segments up to this one, what autograd keeps within it (computed anew) and has not used up yet, gradients that
arrive at an operation and one that leaves it, and the gradients of the parameters so far. Which operation keeps what
is read off a real forward pass of two samples, so any operator will do. The bytes decide only where the cuts are; what
a device really takes is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from strata.execution.flops import forward_by_operation
from strata.graph.inputs import InputSpec

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

SAMPLES = 2
ENOUGH = 1.01
MOST_PLACES = 200  # of large graphs only those with the fewest live bytes are tried


@dataclass(frozen=True)
class Placement:
    """Positions in the ordered list of operations; without cuts nothing is recomputed. The last segment never is."""

    order: tuple[int, ...]  # of the training graph's operations: what needs no gradient comes first
    begin: int  # operations before it run once, and autograd keeps nothing of them
    cuts: tuple[int, ...]
    random: tuple[bool, ...]  # per recomputed segment, whether it draws random numbers
    recomputed_flops: int  # per sample, on top of an ordinary training step


def place(graph: ChannelGraph, cut: Cut, segments: int | str, batch: int) -> Placement:
    """For at most this many segments ("auto": any number): the lowest peak, with no more segments than it takes to be
    within one percent of it. A pure function."""
    module = graph.submodel(cut)
    first = frozen_first(module, watch(module, graph.inputs))
    order = (*first, *(index for index in range(len(calls(module))) if index not in first))
    begin = len(first)
    watched = watch(module, graph.inputs, order)
    allowed = _allowed(watched, begin)
    cuts = _lowest(_costs(watched, allowed, batch / SAMPLES), len(allowed) if segments == "auto" else int(segments))
    positions = [allowed[index] for index in cuts]
    bounds = list(zip([begin, *positions], positions, strict=False))
    by_operation = forward_by_operation(graph, cut)
    work = [by_operation[index] for index in order]
    return Placement(
        order,
        begin,
        tuple(positions),
        tuple(any(watched.calls[i].draws for i in range(p, q)) for p, q in bounds),
        sum(_recomputed(watched, work, p, q) for p, q in bounds),
    )


# --- what a forward pass does ----------------------------------------------------------------------------------------


@dataclass
class Call:
    """One operation; storages are numbered."""

    read: set[int] = field(default_factory=set)  # behind its inputs, without weights, buffers and the batch
    kept: set[int] = field(default_factory=set)  # kept for backward
    changed: set[int] = field(default_factory=set)  # written in place
    parameters: set[int] = field(default_factory=set)  # that it reads and that are trained
    draws: bool = False
    gradient: bool = False  # whether its result needs one


@dataclass
class Watched:
    calls: list[Call]
    sizes: dict[int, int]  # bytes of each storage, by its number
    born: dict[int, int]  # the operation that made it
    last_use: dict[int, int]  # the last operation that reads it; the network's result is read at the end
    standing: set[int]  # weights, buffers and the batch
    batch: set[int]


def calls(module: nn.Module) -> list[fx.Node]:
    """The operations of a SubModel's training graph."""
    graph: fx.Graph = module.train_graph  # type: ignore[assignment]
    return [node for node in graph.nodes if node.op == "call_function"]


def frozen_first(module: nn.Module, watched: Watched) -> list[int]:
    """Operations that may come before all others: those without gradient that only need each other.

    So a frozen layer's result is cut to what trained layers take of it at once, and segments need not keep it whole.
    """
    changed = set().union(*(call.changed for call in watched.calls))
    early: dict[fx.Node, int] = {}
    for index, (node, call) in enumerate(zip(calls(module), watched.calls, strict=True)):
        alone = all(source in early or source.op != "call_function" for source in node.all_input_nodes)
        if alone and not (call.gradient or call.draws or call.changed or call.read & changed):
            early[node] = index
    return list(early.values())


def watch(module: nn.Module, inputs: InputSpec, order: Sequence[int] | None = None) -> Watched:
    """One forward pass of a SubModel in training mode. Its buffers move, so give it one that is not needed again."""
    graph: fx.Graph = module.train_graph  # type: ignore[assignment]
    nodes = calls(module)
    nodes = nodes if order is None else [nodes[index] for index in order]
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []  # held, so that no address is used twice
    values: dict[fx.Node, Any] = {}

    def number(tensor: Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        if address not in numbers:
            numbers[address] = len(numbers)
            tensors.append(tensor)
        return numbers[address]

    def numbers_in(value: Any) -> set[int]:
        several = value if isinstance(value, (list, tuple)) else [value]
        return {number(one) for one in several if isinstance(one, Tensor)}

    batch: set[int] = set()
    example = iter(inputs.example(SAMPLES))
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(example)
            batch |= numbers_in(values[node])
        elif node.op == "get_attr":
            values[node] = _attribute(module, str(node.target))
    found = Watched([], {}, {}, {}, set().union(*(numbers_in(value) for value in values.values())), batch)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for index, node in enumerate(nodes):
            call = Call()
            read = {source: numbers_in(values[source]) for source in node.all_input_nodes}
            for source, own in read.items():
                if source.op == "get_attr" and values[source].requires_grad:
                    call.parameters |= own
            if writes(node):
                call.changed = read.get(node.args[0], set())  # type: ignore[arg-type]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            before = torch.get_rng_state()

            def pack(tensor: Tensor, kept: set[int] = call.kept) -> Tensor:
                kept.add(number(tensor))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            call.draws = not torch.equal(before, torch.get_rng_state())
            several = values[node] if isinstance(values[node], (list, tuple)) else [values[node]]
            call.gradient = any(isinstance(one, Tensor) and one.requires_grad for one in several)
            for one in (numbers_in(values[node]) | call.kept) - found.standing:
                found.born.setdefault(one, index)
            call.read = set().union(*read.values()) - found.standing
            found.last_use |= dict.fromkeys(call.read, index)
            found.calls.append(call)
        output = next(node for node in graph.nodes if node.op == "output")
        for source in output.all_input_nodes:
            for one in numbers_in(values[source]) - found.standing:
                found.last_use[one] = len(nodes)
    found.sizes = {n: tensor.untyped_storage().nbytes() for n, tensor in enumerate(tensors)}
    return found


def writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _attribute(module: nn.Module, name: str) -> Any:
    *path, last = name.split(".")
    return getattr(module.get_submodule(".".join(path)), last)


# --- where to cut ----------------------------------------------------------------------------------------------------


def _allowed(watched: Watched, begin: int) -> list[int]:
    """The begin, the end, and between them the places that no value crosses which is later written in place: a segment
    could not be computed again from inputs that have changed since."""
    end = len(watched.calls)
    forbidden = {
        place
        for index, call in enumerate(watched.calls)
        for one in call.changed
        if one not in watched.standing - watched.batch
        for place in range(watched.born.get(one, -1) + 1, index + 1)
    }
    places = [place for place in range(begin + 1, end) if place not in forbidden]
    places.sort(key=lambda place: (_live(watched, place), place))
    return [begin, *sorted(places[:MOST_PLACES]), end]


def _live(watched: Watched, place: int) -> int:
    return sum(watched.sizes[one] for one in _alive(watched, place))


def _alive(watched: Watched, place: int) -> list[int]:
    """Storages made before this place and read from it on."""
    return [one for one, last in watched.last_use.items() if watched.born[one] < place <= last]


@dataclass(frozen=True)
class _Costs:
    """Bytes over pairs of places [from, to)."""

    crossing: np.ndarray  # of what lives at `to` and was made since `from`: a cut at `to` keeps it
    within: np.ndarray  # that backward through the segment needs beside the inputs kept so far; infinite: not a segment
    first: float  # kept from the start: what operations without gradient hand on


def _costs(watched: Watched, places: list[int], samples: float) -> _Costs:
    """`samples`: how many times larger the batch is than the one watched."""
    end = len(watched.calls)
    kept = np.zeros((end, end))  # by the operation that made it and the first that keeps it
    seen: set[int] = set()
    for index, call in enumerate(watched.calls):
        for one in call.kept - watched.standing - seen:
            kept[watched.born[one], index] += watched.sizes[one]
        seen |= call.kept
    # [p, i]: what operations p .. i keep of what was made since p
    kept = kept[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    alive = [_alive(watched, place) if place < end else [] for place in range(end + 1)]
    arriving = np.array([sum(watched.sizes[one] for one in alive[index + 1]) for index in range(end)])
    leaving = np.array([max((watched.sizes[one] for one in call.read), default=0) for call in watched.calls])
    within = np.full((len(places), len(places)), np.inf)
    crossing = np.zeros((len(places), len(places)))
    gradients = _parameter_gradients(watched)
    for i, start in enumerate(places[:-1]):
        # backward through operations end - 1 .. start; up to each the kept values of those above it are gone again
        highest = np.maximum.accumulate((kept[start] + arriving + leaving)[start:])
        for j, to in enumerate(places[i + 1 :], i + 1):
            within[i, j] = samples * highest[to - start - 1] + gradients[start]
            crossing[i, j] = samples * sum(watched.sizes[one] for one in alive[to] if watched.born[one] >= start)
    # without any cut nothing is recomputed: of what frozen layers hand on only that stays which autograd keeps
    needed = set().union(*(call.kept for call in watched.calls))
    within[0, -1] -= samples * sum(watched.sizes[one] for one in alive[places[0]] if one not in needed)
    return _Costs(crossing, within, samples * _live(watched, places[0]))


def _parameter_gradients(watched: Watched) -> list[int]:
    """Per operation, bytes of the gradients of all parameters that it or a later one reads."""
    seen: set[int] = set()
    totals = []
    for call in reversed(watched.calls):
        seen |= call.parameters
        totals.append(sum(watched.sizes[one] for one in seen))
    return totals[::-1]


def _lowest(costs: _Costs, most: int) -> list[int]:
    """Indices of the cuts whose highest segment is lowest: by bisection over the peak. Then the fewest about as low."""
    low, high = 0.0, costs.first + costs.within[0, -1]
    best: list[int] = []
    while high - low > 1:
        middle = (low + high) / 2
        found = _within(costs, middle, most)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return _within(costs, ENOUGH * high, most) or best


def _within(costs: _Costs, peak: float, most: int) -> list[int] | None:
    """The fewest cuts that keep every segment within `peak`; None if no choice does."""
    count = len(costs.within)
    held = np.full(count, np.inf)  # fewest bytes kept by cuts, with a cut at this place and n segments before it
    held[0] = costs.first
    came_from: list[np.ndarray] = []
    for _ in range(most):
        fits = held[:, None] + costs.within <= peak
        after = np.where(fits, held[:, None] + costs.crossing, np.inf)
        came_from.append(after.argmin(axis=0))
        if fits[:, -1].any():
            path = [int(np.where(fits[:, -1], held, np.inf).argmin())]
            for origin in reversed(came_from[:-1]):
                path.append(int(origin[path[-1]]))
            return [place for place in reversed(path) if place != 0]
        held = after.min(axis=0)
        if np.isinf(held).all():
            return None
    return None


def _recomputed(watched: Watched, work: list[int], start: int, to: int) -> int:
    """Forward FLOPs of the segment up to the last value that backward needs. An operation that keeps its inputs only
    (a convolution) is not carried out for their sake."""
    last = max((index for index in range(start, to) if watched.calls[index].kept), default=start)
    call = watched.calls[last]
    finishes = any(watched.born.get(one) == last for one in call.kept)
    return sum(work[start : last + 1 if finishes else last])
