"""`peak` accounting: the highest live bytes of one training step, in closed form over the sizes of a graph.

The step is forward, cross-entropy, backward and SGD with momentum and weight decay, in steady state: momentum buffers
are there from the start, gradients are not. The frozen part runs in the same forward and counts while it runs.
Operators are described in rules/, the order of allocations in autograd.py; measured.py is what it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from strata.execution.learned import learned
from strata.graph import Ref, SizedOp
from strata.ops.bytes import NoRule, itemsize, simulate
from strata.ops.tape import STANDING, Gradients, Simulation, Value

LABEL_BYTES = INDEX_BYTES = 8
SCALARS = 12  # the momentum factor as a tensor


@dataclass(frozen=True)
class Peak:
    total: int
    weights: int  # parameters and buffers
    gradients: int  # at the moment of the peak: parameters' gradients, and their momentum
    activations: int  # the rest: the batch, values kept for backward, gradients on their way, temporaries


def peak(ops: Sequence[SizedOp], state_bytes: int, trained_sizes: Sequence[int], momentum: bool = True) -> Peak:
    """Of the SizedOps of a cut; `state_bytes` are those of all its parameters and buffers, `trained_sizes` the bytes of
    each trained parameter. Raises NoRule for an operator that has no rule and cannot be learned."""
    trained = sum(trained_sizes)
    momenta = trained if momentum else 0
    batch = sum(prod(op.shape) * itemsize(op) for op in ops if op.kind == "input")
    inputs = batch + prod(ops[-1].shape[:-1]) * LABEL_BYTES  # a label for each row of scores
    sim = Simulation(state_bytes + momenta + inputs)
    logits = _forward(sim, ops)
    sim.run_backward(_loss(sim, logits))
    # The optimizer goes through the parameters one by one; weight decay needs a copy of each gradient.
    sim.passing(max(trained_sizes, default=0) + (SCALARS if momentum else 0))
    gradients = momenta + sim.gradients_at_peak
    return Peak(sim.peak, state_bytes, gradients, sim.peak - state_bytes - gradients)


def _forward(sim: Simulation, ops: Sequence[SizedOp]) -> Value:
    values: dict[str, Any] = {}
    dtypes: dict[str, Any] = {}
    gone_after = _last_uses(ops)
    for index, op in enumerate(ops):
        if op.kind == "op" or op.kind == "cut":
            values[op.name] = _apply(sim, op, values, dtypes)
            dtypes[op.name] = op.dtype
            for name in gone_after[index]:
                gone = values.pop(name)
                for value in gone if isinstance(gone, list) else (gone,):
                    if value is not None:
                        sim.drop(value)
        elif op.kind == "output":
            logits: Value = values[op.inputs[0]]
            return logits
        else:
            value = Value(STANDING, op.shape, itemsize(op))
            value.requires_grad = value.parameter = op.kind == "parameter" and op.requires_grad
            values[op.name] = value
            dtypes[op.name] = op.dtype
    raise ValueError("the graph has no output")


def _apply(sim: Simulation, op: SizedOp, values: dict[str, Any], dtypes: dict[str, Any]) -> Any:
    if op.dtype is None:
        return None  # arithmetic on sizes
    arguments = [_resolve(argument, values) for argument in op.args]
    keywords = {key: _resolve(argument, values) for key, argument in op.kwargs.items()}
    try:
        return simulate(sim, op, arguments, keywords)
    except NoRule:  # there is no rule, or it does not cover this use
        return learned(sim, op, (arguments, keywords), {id(values[name]): dtypes[name] for name in op.inputs})


def _last_uses(ops: Sequence[SizedOp]) -> list[list[str]]:
    """Per line, the variables that go after it: those used for the last time, and a result that is never used."""
    last = {op.name: index for index, op in enumerate(ops) if op.kind == "op" or op.kind == "cut"}
    for index, op in enumerate(ops):
        for name in op.inputs:
            if name in last:
                last[name] = index
    gone: list[list[str]] = [[] for _ in ops]
    for name, index in last.items():
        gone[index].append(name)
    return gone


def _resolve(argument: Any, values: dict[str, Any]) -> Any:
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
