"""Views, and what joins or rearranges tensors by copying them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from strata.ops.bytes.base import (
    NoRule,
    alias,
    aten,
    fresh,
    itemsize,
    pass_on,
    plain,
    rule,
)
from strata.ops.tape import (
    Backward,
    Gradients,
    Simulation,
    Strides,
    Value,
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    is_channels_last,
)

# views


def _record_view(sim: Simulation, x: Value, y: Value, backward: Backward) -> Value:
    if sim.record([x], y, [], backward):
        sim.viewed.add(x.storage)
    return y


@rule(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default)
@rule(aten.unflatten.int, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.squeeze.dims)
def reshape(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.reshape(x, op.shape)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.reshape(gradient, x.shape)]

    if y.storage != x.storage:
        sim.record([x], y, [], backward)
        return y
    return _record_view(sim, x, y, backward)


@rule(aten.permute.default)
def permute(sim: Simulation, op: Any, x: Value, dims: Sequence[int]) -> Value:
    return _permuted(sim, x, [dim % len(x.shape) for dim in dims])


@rule(aten.transpose.int)
def transpose(sim: Simulation, op: Any, x: Value, first: int, second: int) -> Value:
    dims = list(range(len(x.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(sim, x, dims)


@rule(aten.t.default)
def t(sim: Simulation, op: Any, x: Value) -> Value:
    return _permuted(sim, x, list(reversed(range(len(x.shape)))))


def _permuted(sim: Simulation, x: Value, dims: list[int]) -> Value:
    inverse = sorted(range(len(dims)), key=dims.__getitem__)

    def turned(value: Value, order: list[int]) -> Value:
        shape = tuple(value.shape[dim] for dim in order)
        old = value.strides or contiguous_strides(value.shape)
        strides: Strides = tuple(old[dim] for dim in order)
        return sim.view(value, shape, None if strides == contiguous_strides(shape) else strides)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [turned(gradient, inverse)]

    return _record_view(sim, x, turned(x, dims), backward)


@rule(aten.expand.default, aten.expand_as.default)
def expand(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if op.shape == x.shape:
        return _record_view(sim, x, sim.view(x, x.shape, x.strides), pass_on)
    missing = len(op.shape) - len(x.shape)
    old = (0,) * missing + (x.strides or contiguous_strides(x.shape))
    sizes = (1,) * missing + x.shape
    strides = tuple(0 if size != new else step for size, new, step in zip(sizes, op.shape, old, strict=True))
    return _record_view(sim, x, sim.view(x, op.shape, strides), pass_on)  # the engine sums it up to x's size


@rule(aten.slice.Tensor, aten.select.int, aten.narrow.default)
def part(sim: Simulation, op: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    old = x.strides or contiguous_strides(x.shape)
    dim %= len(x.shape)
    if op.target is aten.select.int:
        strides = old[:dim] + old[dim + 1 :]
    else:
        strides = (*old[:dim], old[dim] * (step if op.target is aten.slice.Tensor else 1), *old[dim + 1 :])
    y = sim.view(x, op.shape, None if strides == contiguous_strides(op.shape) else strides)
    return _record_view(sim, x, y, fresh(plain(x)))  # zeros of full size, with the part filled in


@rule(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.split.sizes)
def split(sim: Simulation, op: Any, x: Value, *arguments: Any, dim: int | None = None) -> list[Value]:
    unbind = op.target is aten.unbind.int
    if dim is None:
        position = 0 if unbind else 1
        dim = arguments[position] if len(arguments) > position else 0
    assert dim is not None
    dim %= len(x.shape)
    old = x.strides or contiguous_strides(x.shape)
    strides = old[:dim] + old[dim + 1 :] if unbind else old
    outputs = [sim.view(x, shape, strides) for shape in op.shape]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        zeros = [sim.new(shape, x.itemsize) for shape, g in zip(op.shape, gradients, strict=True) if g is None]
        result = sim.new(x.shape, x.itemsize)
        for zero in zeros:
            sim.drop(zero)
        return [result]

    if sim.record([x], outputs, [], backward):
        sim.viewed.add(x.storage)
    return outputs


@rule(operator.getitem)
def getitem(sim: Simulation, op: Any, values: Sequence[Value], index: int) -> Value:
    return alias(sim, values[index])


# joins and rearrangements that copy


@rule(aten.cat.default, aten.concat.default)
def cat(sim: Simulation, op: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(op.shape)
    y = sim.new(op.shape, itemsize(op), channels_last_strides(op.shape) if _all_channels_last(tensors) else None)
    needs = [v.requires_grad for v in tensors]
    shapes = [v.shape for v in tensors]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        old = gradient.strides or contiguous_strides(gradient.shape)
        return [
            sim.view(gradient, shape, None if old == contiguous_strides(shape) else old) if need else None
            for shape, need in zip(shapes, needs, strict=True)
        ]

    sim.record(list(tensors), y, [], backward)
    return y


def _all_channels_last(tensors: Sequence[Value]) -> bool:
    return all(is_channels_last(v.shape, v.strides) for v in tensors)


@rule(aten.stack.default)
def stack(sim: Simulation, op: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    y = sim.new(op.shape, itemsize(op))
    needs = [v.requires_grad for v in tensors]
    shapes = [v.shape for v in tensors]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        old = gradient.strides or contiguous_strides(gradient.shape)
        strides = old[: dim % len(old)] + old[dim % len(old) + 1 :]
        return [sim.view(gradient, s, strides) if need else None for s, need in zip(shapes, needs, strict=True)]

    sim.record(list(tensors), y, [], backward)
    return y


@rule(aten.index_select.default)
def index_select(sim: Simulation, op: Any, x: Value, dim: int, index: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [index] if isinstance(index, Value) else [], fresh(plain(x)))
    return y


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(
    sim: Simulation, op: Any, x: Value, padding: Sequence[int], mode: str = "constant", *_: Any, **__: Any
) -> Value:
    if op.target is aten.pad.default and mode != "constant":
        raise NoRule("padding that is not constant")
    y = sim.new(op.shape, x.itemsize, elementwise_strides(x) if op.shape == x.shape else None)
    sim.record([x], y, [], fresh(plain(x)))
    return y


@rule(aten.upsample_nearest2d.vec)
def upsample(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.passing(x.bytes + y.bytes)  # both in the kernel's own layout
    sim.record([x], y, [], fresh(plain(x)))
    return y


@rule(aten.repeat.default, aten.flip.default, aten.roll.default, aten.pixel_shuffle.default)
def rearranged(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if op.target is aten.repeat.default and x.requires_grad:
        raise NoRule("repeat in the trained part")
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], fresh(plain(x)))
    return y
