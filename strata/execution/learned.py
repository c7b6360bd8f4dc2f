"""A rule for an operator that has none: run it once, forward and backward, on fake tensors, and see what it does.

Which results are new and which are views, which tensors its backward keeps, how far backward rises above what was
there: that is what a rule says. Each kind of call (operator, sizes, which inputs need gradients) is learned once, and
of torch's own operators it is kept on disk for the next start (lessons.py).
Fake tensors do not show what a kernel alone decides to keep, so a few operators are learned from a real run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from strata.execution.lessons import LearnedResult, Lesson, Lessons
from strata.execution.traced import Storages
from strata.ops import NoRule, operator_of
from strata.ops.tape import Gradients, Simulation, Strides, Value, contiguous_strides

_LESSONS = Lessons()


def learned(sim: Simulation, op: Any, arguments: Any, dtypes: dict[int, torch.dtype]) -> Any:
    """Simulate `op` on `arguments` (args, kwargs with Values); `dtypes` by id of the Value."""
    leaves, structure = pytree.tree_flatten(arguments)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Value)]
    key = (op.target, structure, tuple(_describe(leaf, dtypes) for leaf in leaves))
    lesson = _LESSONS.find(key)
    if lesson is None:
        lesson = _learn(op.target, leaves, structure, dtypes)
        _LESSONS.add(key, lesson)
    results = []
    before = sim.live
    for result in lesson.results:
        if result.view_of is None:
            results.append(sim.new(result.shape, result.itemsize, result.strides))
        else:
            results.append(sim.view(inputs[result.view_of], result.shape, result.strides))
    # without any, none: a segment is computed anew up to the last operation that keeps something
    extra = [sim.allocate(lesson.kept_bytes)] if lesson.kept_bytes else []
    sim.passing(before + lesson.forward - sim.live)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        start = sim.live
        found: Gradients = [None if g is None else _gradient(sim, g, gradients) for g in lesson.gradients]
        sim.passing(start + lesson.backward - sim.live)
        return found

    saved = [inputs[index] for index in lesson.kept_inputs] + [results[index] for index in lesson.kept_results]
    differentiable = [r for r, what in zip(results, lesson.results, strict=True) if what.differentiable]
    if differentiable:
        sim.record(inputs, differentiable, saved, backward, extra)
    else:
        for storage in extra:
            sim.release(storage)
    return results if lesson.many else results[0]


def _gradient(sim: Simulation, gradient: LearnedResult, incoming: Gradients) -> Value:
    given = None if gradient.view_of is None else incoming[gradient.view_of]
    if given is None:
        return sim.new(gradient.shape, gradient.itemsize, gradient.strides)
    if given.shape == gradient.shape:
        given.uses += 1
        return given
    return sim.view(given, gradient.shape, gradient.strides)


def _describe(leaf: Any, dtypes: dict[int, torch.dtype]) -> Any:
    if isinstance(leaf, Value):
        return leaf.shape, leaf.strides, dtypes[id(leaf)], leaf.requires_grad
    return repr(leaf)


@cache
def _fake() -> FakeTensorMode:
    """Made at its first use: it imports torch's compiler, a second that processes without it need not spend."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _learn(target: Any, leaves: list[Any], structure: Any, dtypes: dict[int, torch.dtype]) -> Lesson:
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        raise NoRule(str(target))
    try:
        with torch.random.fork_rng(devices=[]) if operator_of(target).learned_by_running else _fake():
            return _Pupil(target, leaves, structure, dtypes).lesson()
    except Exception as error:  # whatever fake tensors cannot do, tracing the whole step may
        raise NoRule(f"{target}: {error}") from error


class _Start(torch.autograd.Function):
    """Makes the gradient that comes in within backward, so that nobody but autograd holds it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty(gradients[0].shape, dtype=gradients[0].dtype)


class _Pupil:
    def __init__(self, target: Any, leaves: list[Any], structure: Any, dtypes: dict[int, torch.dtype]) -> None:
        self.target, self.leaves, self.structure, self.dtypes = target, leaves, structure, dtypes

    def lesson(self) -> Lesson:
        inputs, results, storages = self._run()
        forward = storages.peak - storages.standing
        tensors = [r for r in results if isinstance(r, Tensor)]
        held = {_key(tensor): position for position, tensor in enumerate(inputs)}
        described = tuple(_result(tensor, held.get(_key(tensor))) for tensor in tensors)
        many = self.many
        gradients = self._gradients(inputs, tensors)
        backward = self._backward_rise() if any(gradients) else 0
        kept = self._kept()
        return Lesson(described, many, forward, *kept, gradients, backward)

    def _run(self) -> tuple[list[Tensor], list[Any], Storages]:
        inputs: list[Tensor] = []
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Value):
                strides = leaf.strides or contiguous_strides(leaf.shape)
                tensor = torch.empty_strided(leaf.shape, strides, dtype=self.dtypes[id(leaf)])
                if leaf.requires_grad:
                    # not a leaf: those are kept alive by the node that accumulates their gradient
                    tensor.requires_grad_()
                    tensor = tensor.view_as(tensor) if 0 in strides else tensor.clone()
                inputs.append(tensor)
                leaf = tensor
            leaves.append(leaf)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        storages = Storages(inputs)
        with storages:
            found = self.target(*args, **kwargs)
        self.many = isinstance(found, (list, tuple))
        return inputs, list(found) if self.many else [found], storages

    def _gradients(self, inputs: list[Tensor], results: list[Tensor]) -> tuple[LearnedResult | None, ...]:
        differentiable = [tensor for tensor in results if tensor.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not wanted or not differentiable:
            return tuple(None for _ in inputs)
        incoming = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in differentiable]
        by_input = iter(torch.autograd.grad(differentiable, wanted, incoming, allow_unused=True))
        gradients = [next(by_input) if tensor.requires_grad else None for tensor in inputs]
        held = {_key(tensor): position for position, tensor in enumerate(incoming)}
        return tuple(None if g is None else _result(g, held.get(_key(g))) for g in gradients)

    def _backward_rise(self) -> int:
        """How far backward rises above what was there, the incoming gradients among it: those of an operator that is
        several to autograd go with the first of them."""
        inputs, results, storages = self._run()
        outputs = [_Start.apply(r) for r in results if isinstance(r, Tensor) and r.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        nothing = [torch.empty((), dtype=output.dtype).expand(output.shape) for output in outputs]
        del results
        storages.start()
        with storages:
            torch.autograd.grad(outputs, wanted, nothing, allow_unused=True)
        return storages.peak - storages.standing - sum(output.nbytes for output in outputs)

    def _kept(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """What stays alive when only the operator's node in autograd's graph is held."""
        inputs, results, storages = self._run()
        nodes = [tensor.grad_fn for tensor in results if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
        input_keys = [_key(tensor) for tensor in inputs]
        result_keys = [_key(tensor) for tensor in results if isinstance(tensor, Tensor)]
        del inputs, results
        alive = set(storages.known) if nodes else set()
        kept_inputs = tuple(i for i, key in enumerate(input_keys) if key in alive)
        fresh = [key for key in result_keys if key not in input_keys]
        kept_results = tuple(i for i, key in enumerate(result_keys) if key in alive and key in fresh)
        others = sum(storages.known[key][1] for key in alive - set(input_keys) - set(result_keys))
        return kept_inputs, kept_results, others


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _strides(tensor: Tensor) -> Strides:
    return None if tensor.is_contiguous() else tuple(tensor.stride())


def _result(tensor: Tensor, view_of: int | None) -> LearnedResult:
    return LearnedResult(tuple(tensor.shape), _strides(tensor), tensor.element_size(), view_of, tensor.requires_grad)
