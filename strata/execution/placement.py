"""Where to cut a submodel's forward pass for activation checkpointing: the places that leave the lowest peak.

A segment is a run of operations [p, q) of the training graph. Backward goes through it with these bytes: the inputs of
all segments up to this one, what autograd keeps within it (computed anew) and has not used up yet, gradients that
arrive at an operation and one that leaves it, and the gradients of the parameters so far. Which operation keeps what is
read off the simulation (simulated.py), which also says what a step with the cuts found here really takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn

from strata.core.errors import BadInput
from strata.execution.apart import CONSTANT, kinds_of
from strata.execution.chunks import is_barrier, may_be_chunked
from strata.execution.compute import forward_by_operation
from strata.execution.layout import channels_last
from strata.execution.norm_statistics import fixed_norms, with_fixed
from strata.execution.segments import Placement, Segmented, writes
from strata.execution.simulated import Pass, Values, each
from strata.graph import Ref
from strata.graph.batch_norms import with_fixed_statistics
from strata.graph.submodel import compiled
from strata.ops.bytes import itemsize
from strata.ops.channels import family
from strata.ops.tape import Simulation

if TYPE_CHECKING:
    from strata.execution.execution import Execution
    from strata.execution.measured import Forward
    from strata.graph import ChannelGraph, Cut, SizedOp

ENOUGH = 1.01
MOST_PLACES = 200  # of large graphs only those with the fewest live bytes are tried


def placement_for(graph: ChannelGraph, cut: Cut, execution: Execution) -> Placement | None:
    """None: the network runs as a whole."""
    segments, chunk = execution.activation_checkpointing, execution.frozen_at_once
    if segments is None and chunk is None:
        return None
    found = place(graph, cut, segments, execution.at_once, chunk, execution.caches)
    if execution.caches:
        _check_constant(graph, cut, execution)
        found = _kept(graph, cut, execution.at_once, found)
    return None if found.is_plain else found


def training_forward(graph: ChannelGraph, cut: Cut, module: nn.Module, execution: Execution) -> Forward | None:
    """How the cut's submodel runs in training; None: by its own forward."""
    return forward_of(module, placement_for(graph, cut, execution), fixed_norms(graph, cut, execution))


def forward_of(module: nn.Module, placement: Placement | None, fixed: frozenset[str]) -> Forward | None:
    """The same where it is known what is recomputed and whose statistics are fixed."""
    training: fx.Graph = module.train_graph  # type: ignore[assignment]
    if fixed:
        training = with_fixed_statistics(training, fixed)
    if placement is not None:
        return Segmented(training, placement)
    return compiled(training, "train") if fixed else None


def place(
    graph: ChannelGraph,
    cut: Cut,
    segments: int | str | None,
    batch: int,
    chunk: int | None = None,
    apart: bool = False,
) -> Placement:
    """For at most this many segments ("auto": any number; None: nothing is recomputed): the lowest peak, with no more
    segments than it takes to be within one percent of it. With a `chunk`, frozen operations that come first run so many
    samples at a time; `apart`: also where that is no fewer than there are. A pure function."""
    ops = graph.sized(cut, batch)
    last = channels_last(graph, cut, ops)
    observed = observe(ops, channels_last=last)
    first = frozen_first(ops, observed)
    everything = range(len(observed.calls))
    chunked = (
        []
        if chunk is None or (chunk >= batch and not apart)
        else _chunkable(graph, ops, first, observe(ops, _moved(first, everything), last), apart)
    )
    if segments is None:
        return Placement(_moved(chunked, everything), len(chunked), (), (), 0, len(chunked), chunk)
    order = _moved(chunked, _moved(first, everything))
    if order != tuple(everything):
        observed = observe(ops, order, last)
    allowed = _allowed(observed, len(first))
    begin = allowed[0]
    cuts = _lowest(_costs(observed, allowed), len(allowed) if segments == "auto" else int(segments))
    positions = [allowed[index] for index in cuts]
    bounds = list(zip([begin, *positions], positions, strict=False))
    by_operation = forward_by_operation(graph, cut)
    work = [by_operation[index] for index in order]
    return Placement(
        order,
        begin,
        tuple(positions),
        tuple(any(observed.calls[i].draws for i in range(p, q)) for p, q in bounds),
        sum(_recomputed(observed, work, p, q) for p, q in bounds),
        len(chunked),
        chunk,
    )


def _check_constant(graph: ChannelGraph, cut: Cut, execution: Execution) -> None:
    """What frozen layers put out can be kept only where it is the same every time."""
    ops = with_fixed(graph.sized(cut, 2), fixed_norms(graph, cut, execution))
    observed = observe(ops, channels_last=channels_last(graph, cut))
    frozen = [op for op, call in zip(_calls(ops), observed.calls, strict=True) if not call.gradient]
    if any(is_barrier(op.target, op.args) for op in frozen):
        raise BadInput(
            "what frozen layers put out depends on the batch, by whose statistics their batch norms go: give "
            "--norm-statistics frozen with --cache-prefix, or leave it out"
        )
    if any(draws(op) for op in frozen):
        raise BadInput(
            "frozen layers draw random numbers (dropout), so what they put out is never the same twice: set their "
            "dropout to 0 (of an hf: model in its config.json), or leave out --cache-prefix"
        )


def _kept(graph: ChannelGraph, cut: Cut, batch: int, placement: Placement) -> Placement:
    """With what is saved where the first operations' outputs are kept, and their bytes."""
    ops = graph.sized(cut, batch)
    calls = _calls(ops)
    inside = {calls[index].name: index for index in placement.order[: placement.chunked]}
    used = {source for op in ops if op.name not in inside for source in op.inputs}
    handed_on = [op for op in calls if op.name in inside and op.name in used and op.dtype is not None]
    kinds, work = kinds_of(graph), forward_by_operation(graph, cut)
    constants = [op for op in handed_on if kinds.get(op.name) == CONSTANT]
    own = [op.shape[1:] if op not in constants else op.shape for op in handed_on]
    return replace(
        placement,
        cached_flops=sum(work[index] for index in placement.order[: placement.chunked]),
        cached_bytes=sum(prod(shape) * itemsize(op) for op, shape in zip(handed_on, own, strict=True)),
        constants=tuple(inside[op.name] for op in constants),
    )


def _calls(ops: Sequence[SizedOp]) -> list[SizedOp]:
    return [op for op in ops if op.kind == "op" or op.kind == "cut"]


# --- what a forward pass does ----------------------------------------------------------------------------------------


@dataclass
class ObservedCall:
    """One operation; storages are numbered."""

    read: set[int] = field(default_factory=set)  # behind its inputs, with weights, buffers and the batch
    kept: set[int] = field(default_factory=set)  # kept for backward
    changed: set[int] = field(default_factory=set)  # written in place
    parameters: set[str] = field(default_factory=set)  # that it reads and that are trained
    draws: bool = False
    gradient: bool = False  # whether its result needs one


@dataclass
class Observed:
    calls: list[ObservedCall]
    sizes: list[int]  # bytes of each storage; nothing for what is there all the time
    born: dict[int, int]  # the operation that made it; -1: weights, buffers and the batch
    last_use: dict[int, int]  # the last operation that reads it; the network's result is read at the end
    weights: set[int]  # and buffers
    parameters: dict[str, int]  # bytes of each that is trained


def observe(ops: Sequence[SizedOp], order: Sequence[int] | None = None, channels_last: bool = False) -> Observed:
    """One forward pass in this order, in which nothing goes."""
    sim = Simulation(0)
    forward = Pass(sim, ops, channels_last)
    calls = forward.calls if order is None else [forward.calls[index] for index in order]
    values: Values = dict(forward.standing)
    standing = {value.storage for value in forward.standing.values()}
    weights = {forward.standing[name].storage for name in forward.weights}
    trained = {op.name: prod(op.shape) * itemsize(op) for op in ops if op.kind == "parameter" and op.requires_grad}
    found = Observed([], sim.sizes, dict.fromkeys(standing, -1), {}, weights, trained)
    for index, op in enumerate(calls):
        before, recorded = len(sim.sizes), len(sim.nodes)
        values[op.name] = forward.apply_or_guess(op, values)
        found.born |= dict.fromkeys(range(before, len(sim.sizes)), index)
        read = {storage for name in op.inputs for storage in storages(values[name])}
        call = ObservedCall(read=read)
        call.kept = {storage for node in sim.nodes[recorded:] for storage in node.saved}
        if writes(op.target) and isinstance(op.args[0], Ref):
            call.changed = storages(values[op.args[0].name])
        call.parameters = {name for name in op.inputs if name in trained}
        call.draws = draws(op)
        call.gradient = any(value.requires_grad for value in each(values[op.name]))
        found.last_use |= dict.fromkeys(read - weights, index)
        found.calls.append(call)
    found.last_use |= dict.fromkeys(storages(values[forward.output]) - weights, len(calls))
    return found


def storages(one: Any) -> set[int]:
    return {value.storage for value in each(one)}


def draws(op: SizedOp) -> bool:
    """Whether it takes random numbers; dropout that is off does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ()):
        return False
    arguments = op.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip([argument.name for argument in arguments], op.args, strict=False)) | op.kwargs
    chance = given.get("dropout_p", given.get("dropout", given.get("p") if "dropout" in str(op.target) else None))
    return chance != 0 and given.get("train") is not False


def frozen_first(ops: Sequence[SizedOp], observed: Observed) -> list[int]:
    """Operations that may come before all others: those without gradient that only need each other.

    So a frozen layer's result is cut to what trained layers take of it at once, and segments need not keep it whole.
    None of them may pass one that writes what it reads, or reads what it writes; what only counts batches stays.
    """
    calls = _calls(ops)
    waiting = {op.name for op in calls}
    early: list[int] = []
    read: set[int] = set()
    changed: set[int] = set()
    for index, (op, call) in enumerate(zip(calls, observed.calls, strict=True)):
        apart = not (call.read & changed or call.changed & (read | changed | observed.weights))
        if apart and not (call.gradient or call.draws or waiting.intersection(op.inputs)):
            early.append(index)
            waiting.remove(op.name)
        else:
            read |= call.read
            changed |= call.changed
    return early


def _moved(first: Sequence[int], rest: Iterable[int]) -> tuple[int, ...]:
    """Those first, and of the rest the others."""
    early = set(first)
    return (*first, *(index for index in rest if index not in early))


def _chunkable(
    graph: ChannelGraph, ops: Sequence[SizedOp], first: Sequence[int], observed: Observed, by_trial: bool = False
) -> list[int]:
    """Which of the operations that may come first, and were observed there, may run some samples at a time: up to one
    in which samples meet elsewhere than in a batch norm; and so that nothing remains of them but batches of samples,
    which are not written in place later. `by_trial`: one sample at a time, and values are looked at (apart.py)."""
    calls = _calls(ops)
    forbidden = _written_later(observed)
    users: dict[str, set[str]] = {}
    for op in ops:
        for source in op.inputs:
            users.setdefault(source, set()).add(op.name)

    def crossing(chosen: Sequence[int]) -> list[SizedOp]:
        inside = {calls[index].name for index in chosen}
        return [calls[index] for index in chosen if users.get(calls[index].name, set()) - inside]

    if by_trial:
        kinds = kinds_of(graph)
        most = len(first)

        def suits(op: SizedOp) -> bool:
            return op.name in kinds or (op.kind == "cut" and op.inputs[0] in kinds)

    else:
        mode = graph.mode("train")
        nodes = {node.name: node for node in mode.graph.nodes}
        batch = str(mode.inputs[0].meta["val"].shape[0])
        apart = [_is_apart(calls[index], nodes, batch) for index in first]
        most = next((number for number, one in enumerate(apart) if not one), len(apart))

        def suits(op: SizedOp) -> bool:
            return isinstance(op.shape, tuple) or family(nodes[op.name]) == "sym_size"

    def fits(end: int) -> bool:
        return end not in forbidden and all(suits(op) for op in crossing(first[:end]))

    chosen = list(first[: next(end for end in range(most, -1, -1) if end == 0 or fits(end))])
    for index in reversed(chosen):  # a part of what is handed on anyway is taken there, not kept beside it
        left = {op.name for op in crossing(chosen)}
        others = {op.name for op in crossing([one for one in chosen if one != index])}
        if calls[index].kind == "cut" and calls[index].name in left and others < left:
            chosen.remove(index)
    return chosen


def _is_apart(op: SizedOp, nodes: dict[str, fx.Node], batch: str) -> bool:
    if op.kind == "cut":
        return op.target is not torch.ops.aten.detach.default  # that is of a weight, not of samples
    return may_be_chunked(nodes[op.name], batch)


# --- where to cut ----------------------------------------------------------------------------------------------------


def _allowed(observed: Observed, begin: int) -> list[int]:
    """The begin, the end, and between them the places that no value crosses which is later written in place: a segment
    could not be computed again from inputs that have changed since. A begin that is no such place moves on."""
    end = len(observed.calls)
    forbidden = _written_later(observed)
    begin = next(place for place in range(begin, end + 1) if place not in forbidden)
    places = [place for place in range(begin + 1, end) if place not in forbidden]
    places.sort(key=lambda place: (_live(observed, place), place))
    return [begin, *sorted(places[:MOST_PLACES]), end]


def _written_later(observed: Observed) -> set[int]:
    """Places that a value crosses which is later written in place."""
    return {
        place
        for index, call in enumerate(observed.calls)
        for one in call.changed
        if one not in observed.weights
        for place in range(observed.born[one] + 1, index + 1)
    }


def _live(observed: Observed, place: int) -> int:
    return sum(observed.sizes[one] for one in _alive(observed, place))


def _alive(observed: Observed, place: int) -> list[int]:
    """Storages made before this place and read from it on."""
    return [one for one, last in observed.last_use.items() if observed.born[one] < place <= last]


@dataclass(frozen=True)
class _Costs:
    """Bytes over pairs of places [from, to)."""

    crossing: np.ndarray  # of what lives at `to` and was made since `from`: a cut at `to` keeps it
    within: np.ndarray  # that backward through the segment needs beside the inputs kept so far; infinite: not a segment
    first: float  # kept from the start: what operations without gradient hand on


def _costs(observed: Observed, places: list[int]) -> _Costs:
    end = len(observed.calls)
    kept = np.zeros((end, end))  # by the operation that made it and the first that keeps it
    seen: set[int] = set()
    for index, call in enumerate(observed.calls):
        for one in call.kept - seen:
            if observed.born[one] >= 0:
                kept[observed.born[one], index] += observed.sizes[one]
        seen |= call.kept
    # [p, i]: what operations p .. i keep of what was made since p
    kept = kept[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    alive = [_alive(observed, place) if place < end else [] for place in range(end + 1)]
    arriving = np.array([sum(observed.sizes[one] for one in alive[index + 1]) for index in range(end)])
    leaving = np.array([max((observed.sizes[one] for one in call.read), default=0) for call in observed.calls])
    within = np.full((len(places), len(places)), np.inf)
    crossing = np.zeros((len(places), len(places)))
    gradients = _parameter_gradients(observed)
    for i, start in enumerate(places[:-1]):
        # backward through operations end - 1 .. start; up to each the kept values of those above it are gone again
        highest = np.maximum.accumulate((kept[start] + arriving + leaving)[start:])
        ends = np.array(places[i + 1 :])
        within[i, i + 1 :] = highest[ends - start - 1] + gradients[start]
    for j, to in enumerate(places[1:], 1):
        made = np.zeros(end)  # bytes alive at `to`, by the operation that made them
        for one in alive[to]:
            if observed.born[one] >= 0:
                made[observed.born[one]] += observed.sizes[one]
        crossing[:j, j] = made[::-1].cumsum()[::-1][places[:j]]
    # without any cut nothing is recomputed: of what frozen layers hand on only that stays which autograd keeps
    needed = set().union(*(call.kept for call in observed.calls))
    within[0, -1] -= sum(observed.sizes[one] for one in alive[places[0]] if one not in needed)
    return _Costs(crossing, within, _live(observed, places[0]))


def _parameter_gradients(observed: Observed) -> list[int]:
    """Per operation, bytes of the gradients of all parameters that it or a later one reads."""
    seen: set[str] = set()
    totals = []
    for call in reversed(observed.calls):
        seen |= call.parameters
        totals.append(sum(observed.parameters[one] for one in seen))
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


def _recomputed(observed: Observed, work: list[int], start: int, to: int) -> int:
    """Forward FLOPs of the segment up to the last value that backward needs. An operation that keeps its inputs only
    (a convolution) is not carried out for their sake."""
    last = max((index for index in range(start, to) if observed.calls[index].kept), default=start)
    call = observed.calls[last]
    finishes = any(observed.born.get(one) == last for one in call.kept)
    return sum(work[start : last + 1 if finishes else last])
