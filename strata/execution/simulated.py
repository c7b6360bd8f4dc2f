"""`peak` accounting: the highest live bytes of one training step, in closed form over the sizes of a graph.

The step is forward, cross-entropy, backward and SGD with momentum and weight decay, in steady state: momentum buffers
are there from the start, gradients are not. The frozen part runs in the same forward and counts while it runs. Of a
batch in parts each part is a pass of its own, beside the gradients of those before it.
What operators do is in ops/bytes, the order of allocations in ops/tape.py; measured.py is what it is tested against.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from strata.execution.chunks import is_barrier, stretches
from strata.execution.execution import Execution
from strata.execution.learned import learned
from strata.execution.segments import Boundary, Placement, boundaries, writes
from strata.graph import Ref, SizedOp
from strata.graph.inputs import Input, InputSpec
from strata.ops.bytes import NoRule, alias, itemsize, simulate
from strata.ops.tape import (
    Gradients,
    Segment,
    Simulation,
    Strides,
    Value,
    channels_last_strides,
    is_channels_last,
)

LABEL_BYTES = INDEX_BYTES = 8
RANDOM_STATE = 5056  # the generator's, which a segment that draws keeps


@dataclass(frozen=True)
class Peak:
    total: int
    weights: int  # parameters and buffers
    gradients: int  # at the moment of the peak: parameters' gradients, and their momentum
    activations: int  # the rest: the batch, values kept for backward, gradients on their way, temporaries


def peak(
    ops: Sequence[SizedOp],
    state_bytes: int,
    trained_sizes: Sequence[int],
    execution: Execution,
    placement: Placement | None = None,
    accumulated: bool = False,
    inputs: InputSpec | None = None,
    channels_last: bool = False,
    alone: Sequence[SizedOp] = (),
) -> Peak:
    """Of one pass over the SizedOps of a cut, which are those of a batch or a part of it.

    `state_bytes` are those of all weights and buffers, `trained_sizes` the bytes of each trained parameter;
    `accumulated`: their gradients are there, from earlier parts. `inputs` say how the data holds samples that wait for
    their part; `channels_last`: how images lie (layout.py); `alone`: the operations of a single sample, where frozen
    layers take one by one. Raises NoRule for an operator that has no rule and cannot be learned.
    """
    trained = sum(trained_sizes)
    momenta = execution.slot_bytes(trained)
    standing = state_bytes + momenta + _batch_bytes(ops, execution, inputs)
    sim = Simulation(standing, gradients=trained if accumulated else 0)
    if execution.release_gradients:
        sim.step = lambda size: execution.step_copies * size
    logits = Pass(sim, ops, channels_last, alone).run(placement)
    sim.run_backward(_loss(sim, logits))
    if not execution.release_gradients:  # the optimizer goes through the parameters one by one
        sim.passing(execution.step_copies * max(trained_sizes, default=0))
    gradients = momenta + sim.gradients_at_peak
    return Peak(sim.peak, state_bytes, gradients, sim.peak - state_bytes - gradients)


def _batch_bytes(ops: Sequence[SizedOp], execution: Execution, inputs: InputSpec | None) -> int:
    """A label for each row of scores, and the samples: as the network takes them, or in parts as the data holds them
    and those of this pass as the network takes them."""
    given = [op for op in ops if op.kind == "input"]
    scores = ops[-1].shape[1:]
    labels = prod(scores[1:] if len(scores) == 3 else scores[:-1]) * LABEL_BYTES  # of pictures, classes come first
    taken = [prod(op.shape[1:]) * itemsize(op) for op in given]
    if not execution.in_parts or not execution.waits_as_stored:
        return execution.batch_size * (labels + sum(taken))
    spec = inputs or InputSpec(tuple(Input(op.name, op.shape[1:], op.dtype or torch.float32) for op in given))
    made = [size for size, one in zip(taken, spec.inputs, strict=True) if one.stored != one.dtype]
    return execution.batch_size * (labels + spec.stored_bytes) + given[0].shape[0] * sum(made)


Values = dict[str, Any]  # by the operation's name: a Value, a list of them, or None for a size


class Pass:
    """A forward pass over the operations of a network."""

    def __init__(
        self, sim: Simulation, ops: Sequence[SizedOp], channels_last: bool, alone: Sequence[SizedOp] = ()
    ) -> None:
        self.sim = sim
        self.alone = [op for op in alone if op.kind == "op" or op.kind == "cut"]
        self.calls = [op for op in ops if op.kind == "op" or op.kind == "cut"]
        self.samples = next((op.shape[0] for op in ops if op.kind == "input"), 1)
        (self.output,) = (op.inputs[0] for op in ops if op.kind == "output")
        self.dtypes = {op.name: op.dtype for op in ops if op.dtype is not None}
        self.weights = {op.name for op in ops if op.kind == "parameter" or op.kind == "buffer"}
        # weights, buffers and the batch are counted already; a storage of their own says who writes to them
        there = [op for op in ops if op.kind in ("input", "parameter", "buffer")]
        self.standing = {op.name: _standing(sim, op, channels_last) for op in there}

    def run(self, placement: Placement | None = None) -> Value:
        """To the network's result."""
        values = dict(self.standing)
        if placement is None or placement.is_plain:
            self._run_all(self.calls, values, {self.output})
        else:
            parts = placement.parts(self.calls)
            named = [[(op.name, [x for x in op.inputs if x not in self.weights]) for op in part] for part, _ in parts]
            for number, ((part, draws), boundary) in enumerate(zip(parts, boundaries(named, self.output), strict=True)):
                if number == 0 and placement.chunked and placement.cached_bytes is not None:
                    alone = [self.alone[index] for index in placement.order[: placement.chunked]]
                    constants = {self.calls[index].name for index in placement.constants}
                    self._run_by_one(alone, values, boundary, constants)
                elif number == 0 and placement.chunked and self.samples > (placement.chunk or 0):
                    self._run_chunks(part, values, boundary, placement.chunk or 0)
                elif draws is None and placement.chunked:
                    self._run_all(part, values, boundary.outputs, boundary.gone)
                    continue
                elif draws is None:
                    self._run_all(part, values, boundary.outputs)
                else:
                    self._run_segment(part, values, boundary, draws)
                for name in boundary.gone:
                    self._drop(values.pop(name))
        logits: Value = values[self.output]
        return logits

    def apply(self, op: SizedOp, values: Values) -> Any:
        """The result of one operation."""
        if op.dtype is None:
            return None  # arithmetic on sizes
        arguments = [_resolve(argument, values) for argument in op.args]
        keywords = {key: _resolve(argument, values) for key, argument in op.kwargs.items()}
        try:
            return simulate(self.sim, op, arguments, keywords)
        except NoRule:  # there is no rule, or it does not cover this use
            dtypes = {id(values[name]): self.dtypes[name] for name in op.inputs if name in self.dtypes}
            return learned(self.sim, op, (arguments, keywords), dtypes)

    def apply_or_guess(self, op: SizedOp, values: Values) -> Any:
        """The same of any operator: one that the simulation does not know keeps all it can."""
        try:
            return self.apply(op, values)
        except NoRule:
            return _guess(self.sim, op, values)

    def _run_all(
        self, part: Sequence[SizedOp], values: Values, outputs: Collection[str], given: Collection[str] = ()
    ) -> None:
        """`given`: inputs that go with their last use too."""
        for op, gone in zip(part, _last_uses(part, outputs, given), strict=True):
            values[op.name] = self.apply(op, values)
            for name in gone:
                self._drop(values.pop(name))

    def _run_chunks(self, part: Sequence[SizedOp], values: Values, boundary: Boundary, size: int) -> None:
        """As chunks.ChunkedSegment does it: stretch by stretch, in each of them chunk by chunk."""
        sim = self.sim
        sizes = [min(size, self.samples - start) for start in range(0, self.samples, size)]
        chunks = [{**values, **{name: _share(values[name], n) for name in boundary.inputs}} for n in sizes]
        gone = _last_uses(part, ())  # what the trained part takes is a share of the whole, which stays
        whole: Values = {}
        for stretch in stretches([is_barrier(op.target, op.args) for op in part]):
            for n, own in zip(sizes, chunks, strict=True):
                for index in stretch:
                    op = _resized(part[index], n)
                    made = self.apply(op, own)
                    if op.name in boundary.outputs and made is not None:
                        if op.name not in whole:
                            strides = _laid_out(made, self.samples)
                            whole[op.name] = sim.new((self.samples, *made.shape[1:]), made.itemsize, strides)
                        share = sim.view(whole[op.name], made.shape, _laid_out(made, n))
                        self._drop(made)
                        made = share
                    own[op.name] = made
                    for name in gone[index]:
                        self._drop(own.pop(name))
        values |= {name: whole.get(name) for name in boundary.outputs}

    def _run_by_one(
        self, part: Sequence[SizedOp], values: Values, boundary: Boundary, constants: Collection[str]
    ) -> None:
        """As chunks.ChunkedSegment.run_by_one does it. The second sample has the whole batch's outputs beside it."""
        sim = self.sim
        whole: Values = {}
        for _ in range(min(2, self.samples)):
            own = {**values, **{name: _share(values[name], 1) for name in boundary.inputs}}
            self._run_all(part, own, boundary.outputs)
            for name in boundary.outputs:
                made = own[name]
                if made is None:
                    whole[name] = None
                elif name in constants:
                    self._drop(whole.get(name))
                    whole[name] = made
                else:
                    if name not in whole:
                        strides = _laid_out(made, self.samples)
                        whole[name] = sim.new((self.samples, *made.shape[1:]), made.itemsize, strides)
                    self._drop(made)
        values |= whole

    def _run_segment(self, part: Sequence[SizedOp], values: Values, boundary: Boundary, draws: bool) -> None:
        sim = self.sim
        held = {name: _again(sim, values[name]) for name in boundary.inputs}
        kept = [value.storage for one in held.values() for value in each(one)]
        if draws:
            kept.append(sim.allocate(RANDOM_STATE))
        last, finishes = -1, False  # the last operation that keeps something; whether that is a result of its own

        def again() -> None:
            self._run_until(part, self.standing | held, boundary.outputs, last, finishes)

        segment = sim.segment = Segment(kept, again)
        for index, (op, gone) in enumerate(zip(part, _last_uses(part, boundary.outputs), strict=True)):
            asking, before = segment.waiting, len(sim.sizes)
            values[op.name] = self.apply(op, values)
            if segment.waiting > asking:
                last, finishes = index, segment.newest >= before
            for name in gone:
                self._drop(values.pop(name))
        sim.segment = None
        sim.end(segment)

    def _run_until(
        self, part: Sequence[SizedOp], values: Values, outputs: Collection[str], last: int, finishes: bool
    ) -> None:
        """The second run stops where the last value is kept: before an operation that keeps what it was given."""
        sim = self.sim
        self._run_all(part[:last], values, {name for op in part[last:] for name in op.inputs} | set(outputs))
        highest = sim.peak, sim.gradients_at_peak
        values[part[last].name] = self.apply(part[last], values)
        if not finishes:
            sim.peak, sim.gradients_at_peak = highest
        for op in part[: last + 1]:
            self._drop(values.pop(op.name, None))

    def _drop(self, one: Any) -> None:
        for value in each(one):
            self.sim.drop(value)


def _standing(sim: Simulation, op: SizedOp, channels_last: bool) -> Value:
    strides = None
    # a single channel is first and last at once, and such images stay as they are
    if channels_last and len(op.shape) == 4 and (op.kind != "input" or (op.shape[1] > 1 and prod(op.shape[2:]) > 1)):
        strides = channels_last_strides(op.shape)
    value = Value(sim.allocate(0), op.shape, itemsize(op), strides)
    value.requires_grad = value.parameter = op.kind == "parameter" and op.requires_grad
    return value


def _share(value: Any, samples: int) -> Any:
    """Of what is there all the time: so many samples of it."""
    if not isinstance(value, Value):
        return value
    return Value(value.storage, (samples, *value.shape[1:]), value.itemsize, _laid_out(value, samples))


def _laid_out(value: Value, samples: int) -> Strides:
    """So many samples, without gaps and in the order in which these lie in memory."""
    shape = (samples, *value.shape[1:])
    return channels_last_strides(shape) if is_channels_last(value.shape, value.strides) else None


def _resized(op: SizedOp, samples: int) -> SizedOp:
    if op.shape is None:
        return op
    several = op.shape if isinstance(op.shape, list) else [op.shape]
    shapes = [(samples, *shape[1:]) for shape in several]
    return replace(op, shape=shapes if isinstance(op.shape, list) else shapes[0])


def _guess(sim: Simulation, op: SizedOp, values: Values) -> Any:
    inputs = [value for name in op.inputs for value in each(values[name])]
    several = op.shape if isinstance(op.shape, list) else [op.shape]
    in_place = writes(op.target) and inputs
    results = [sim.view(inputs[0], inputs[0].shape, None)] if in_place else [sim.new(s, itemsize(op)) for s in several]
    if op.requires_grad:
        sim.record(inputs, results, [*inputs, *results], _never)
    return results if isinstance(op.shape, list) else results[0]


def _never(sim: Simulation, gradients: Gradients) -> Gradients:
    raise AssertionError("only forward passes are guessed")


def each(one: Any) -> list[Value]:
    several = one if isinstance(one, list) else [one]
    return [value for value in several if value is not None]


def _again(sim: Simulation, one: Any) -> Any:
    """Another reference to the same tensors."""
    if isinstance(one, list):
        return [_again(sim, value) for value in one]
    return None if one is None else alias(sim, one)


def _last_uses(part: Sequence[SizedOp], outputs: Collection[str], given: Collection[str] = ()) -> list[list[str]]:
    """Per operation, what goes after it: results used for the last time, or never, and what is `given`. `outputs`
    stay."""
    last = dict.fromkeys(given, 0) | {op.name: index for index, op in enumerate(part)}
    for index, op in enumerate(part):
        for name in op.inputs:
            if name in last:
                last[name] = index
    gone: list[list[str]] = [[] for _ in part]
    for name, index in last.items():
        if name not in outputs:
            gone[index].append(name)
    return gone


def _resolve(argument: Any, values: Values) -> Any:
    kind = type(argument)
    if kind is Ref:
        return values[argument.name]
    if isinstance(argument, (list, tuple)):
        return [_resolve(item, values) for item in argument]
    return argument


def index_bytes(ops: Sequence[SizedOp]) -> int:
    """The submodel holds the kept positions of each index_select as a buffer, for training and for evaluation."""
    selects = (op for op in ops if op.kind == "cut" and op.target is torch.ops.aten.index_select.default)
    return sum(2 * INDEX_BYTES * op.shape[op.args[1]] for op in selects)


def _loss(sim: Simulation, logits: Value) -> Value:
    """Cross-entropy: log-softmax, which keeps its result, and the negative log-likelihood, which keeps that too."""
    size = logits.bytes

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (incoming,) = gradients
        assert incoming is not None
        picked = sim.allocate(size)
        sim.drop(incoming)
        gradients[0] = None
        result = sim.new(logits.shape, logits.itemsize)
        sim.release(picked)
        return [result]

    probabilities = sim.allocate(size)
    loss = sim.new((), logits.itemsize)
    weight = sim.allocate(logits.itemsize)
    sim.record([logits], loss, [], backward, [probabilities, weight])
    sim.drop(logits)
    return loss
