"""Views, and other operators that only move elements: what they do to a tensor they do to its ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from strata.ops.bytes import alias, fresh, pass_on, plain
from strata.ops.channels import FxNode, Unsupported, Walk, argument, elementwise, family
from strata.ops.families.pooling import on_maps
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.resize import Along, Call, take, unchanged
from strata.ops.sized import SizedOp
from strata.ops.tape import Backward, Gradients, Simulation, Strides, Value, contiguous_strides

aten = torch.ops.aten


def record_view(sim: Simulation, x: Value, y: Value, backward: Backward) -> Value:
    if sim.record([x], y, [], backward):
        sim.viewed.add(x.storage)
    return y


# --- view, reshape, flatten, expand ------------------------------------------------------------------------------


def movement(p: Walk, node: FxNode) -> Any:
    return p.run(node)


def sizes(node: FxNode, before: Along | None, after: Along | None) -> Call:
    sizes = list(node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:])
    if after is not None and not after.whole and not (isinstance(sizes[after.dim], int) and sizes[after.dim] == -1):
        if after.batched:  # only the running batch knows this size, so another must not be left open
            known = node.meta["val"].shape
            sizes = [k if isinstance(s, int) and s == -1 else s for s, k in zip(sizes, known, strict=True)]
        sizes[after.dim] = -1 if after.batched else after.kept
    return Call(node.target, (node.args[0], sizes), dict(node.kwargs))


def unflattened_sizes(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim, sizes = node.args[1], list(node.args[2])
    if after is not None and not after.whole:
        rank = len(node.meta["val"].shape)
        first = dim % (rank - len(sizes) + 1)
        if 0 <= after.dim - first < len(sizes) and sizes[after.dim - first] != -1:
            sizes[after.dim - first] = after.kept
    return Call(node.target, (node.args[0], dim, sizes), dict(node.kwargs))


def squeezed_dims(node: FxNode, before: Along | None, after: Along | None) -> Call:
    """Only what the full model squeezes: a channel that is left alone stays a dim."""
    if node.target is not aten.squeeze.default:
        return unchanged(node)
    dims = [dim for dim, size in enumerate(node.args[0].meta["val"].shape) if isinstance(size, int) and size == 1]
    return Call(aten.squeeze.dims, (node.args[0], dims), {})


def reshape_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.reshape(x, op.shape)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.reshape(gradient, x.shape)]

    if y.storage != x.storage:
        sim.record([x], y, [], backward)
        return y
    return record_view(sim, x, y, backward)


def expand_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    if op.shape == x.shape:
        return record_view(sim, x, sim.view(x, x.shape, x.strides), pass_on)
    missing = len(op.shape) - len(x.shape)
    old = (0,) * missing + (x.strides or contiguous_strides(x.shape))
    sizes = (1,) * missing + x.shape
    strides = tuple(0 if size != new else step for size, new, step in zip(sizes, op.shape, old, strict=True))
    return record_view(sim, x, sim.view(x, op.shape, strides), pass_on)  # the engine sums it up to x's size


_view = register(
    Operator(
        ("view", "reshape"),
        channels=movement,
        resize=sizes,
        bytes=reshape_bytes,
        bytes_for=("default",),
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="flatten",
    )
)
register(replace(_view, names=("_unsafe_view",), samples_apart=SamplesApart.NEVER, vectorised=None))
register(replace(_view, names=("flatten",), resize=None, bytes_for=("using_ints",)))
_unsqueeze = register(
    Operator(("unsqueeze",), channels=movement, bytes=reshape_bytes, bytes_for=("default",), flops=nothing)
)
register(replace(_unsqueeze, names=("squeeze",), resize=squeezed_dims, bytes_for=("default", "dim", "dims")))
register(replace(_unsqueeze, names=("unflatten",), resize=unflattened_sizes, bytes_for=("int",)))
register(
    Operator(("expand",), channels=movement, resize=sizes, bytes=expand_bytes, bytes_for=("default",), flops=nothing)
)


register(
    Operator(
        ("expand_as",),
        channels=elementwise,
        bytes=expand_bytes,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
    )
)


# --- permute, transpose ------------------------------------------------------------------------------------------


def permute_bytes(sim: Simulation, op: SizedOp, x: Value, dims: Sequence[int]) -> Value:
    return _permuted(sim, x, [dim % len(x.shape) for dim in dims])


def transpose_bytes(sim: Simulation, op: SizedOp, x: Value, first: int, second: int) -> Value:
    dims = list(range(len(x.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(sim, x, dims)


def t_bytes(sim: Simulation, op: SizedOp, x: Value) -> Value:
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

    return record_view(sim, x, turned(x, dims), backward)


_permute = register(
    Operator(("permute",), channels=movement, bytes=permute_bytes, flops=nothing, samples_apart=SamplesApart.ALWAYS)
)
register(replace(_permute, names=("transpose",), bytes=transpose_bytes, bytes_for=("int",)))
register(replace(_permute, names=("t",), bytes=t_bytes, samples_apart=SamplesApart.NEVER))


# --- parts: slice, select, split ---------------------------------------------------------------------------------


def select_channels(p: Walk, node: FxNode) -> Any:
    """Whoever takes one element out needs it to be there; q, k, v stacked in one dim are tied instead."""
    x = node.args[0]
    dim = argument(node, 1, "dim", 0) % len(p.shape_of(x))
    if dim in p.varying(p.labels(x)):
        p.tie_across(x, dim)
    return p.run(node)


def kept_slice(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim = argument(node, 1, "dim", 0) % len(node.meta["val"].shape)
    if before is None or before.dim != dim:
        return unchanged(node)
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    if family(node) == "narrow":
        start, stop, step = argument(node, 2, "start"), argument(node, 2, "start") + argument(node, 3, "length"), 1
    chosen = np.zeros_like(before.mask)
    chosen[slice(start, stop, step)] = True
    return take(node.args[0], dim, np.flatnonzero(chosen[before.mask]))


def kept_position(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim = node.args[1]
    index = node.args[2]
    rank = len(node.meta["val"].shape) + 1
    if before is None or before.dim != dim % rank:
        return unchanged(node)
    position = int(before.mask[: index % len(before.mask)].sum())
    return Call(node.target, (node.args[0], dim, position), dict(node.kwargs))


def kept_lengths(node: FxNode, before: Along | None, after: Along | None) -> Call:
    rank = len(node.meta["val"][0].shape)
    dim = argument(node, 2, "dim", 0) % rank
    if before is None or before.dim != dim:
        return unchanged(node)
    wanted = node.args[1]
    size = len(before.mask)
    if family(node).endswith("chunk"):
        wanted = -(-size // wanted)
    lengths = [min(wanted, size - at) for at in range(0, size, wanted)] if isinstance(wanted, int) else list(wanted)
    edges = np.cumsum([0, *lengths])
    kept = [int(before.mask[a:b].sum()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return Call(aten.split_with_sizes.default, (node.args[0], kept, dim), {})


def part_bytes(
    sim: Simulation, op: SizedOp, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    old = x.strides or contiguous_strides(x.shape)
    dim %= len(x.shape)
    if op.target is aten.select.int:
        strides = old[:dim] + old[dim + 1 :]
    else:
        strides = (*old[:dim], old[dim] * (step if op.target is aten.slice.Tensor else 1), *old[dim + 1 :])
    y = sim.view(x, op.shape, None if strides == contiguous_strides(op.shape) else strides)
    return record_view(sim, x, y, fresh(plain(x)))  # zeros of full size, with the part filled in


def split_bytes(sim: Simulation, op: SizedOp, x: Value, *arguments: Any, dim: int | None = None) -> list[Value]:
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


def getitem_bytes(sim: Simulation, op: SizedOp, values: Sequence[Value], index: int) -> Value:
    return alias(sim, values[index])


_slice = register(
    Operator(("slice",), channels=movement, resize=kept_slice, bytes=part_bytes, bytes_for=("Tensor",), flops=nothing)
)
register(replace(_slice, names=("narrow",), bytes_for=("default",)))
register(replace(_slice, names=("select",), channels=select_channels, resize=kept_position, bytes_for=("int",)))
_split = register(
    Operator(
        ("split",),
        channels=movement,
        resize=kept_lengths,
        bytes=split_bytes,
        bytes_for=("Tensor", "sizes"),
        flops=nothing,
    )
)
register(replace(_split, names=("split_with_sizes", "chunk"), bytes_for=("default",)))
register(replace(_split, names=("unsafe_chunk", "unsafe_split"), bytes=None, bytes_for=()))
register(replace(_split, names=("unbind",), channels=select_channels, resize=None, bytes_for=("int",)))
register(Operator(("getitem",), bytes=getitem_bytes, flops=nothing))  # of what a split gave


# --- padding, and moves that copy --------------------------------------------------------------------------------


def pad_channels(p: Walk, node: FxNode) -> Any:
    if family(node) == "pad" and argument(node, 2, "mode", "constant") != "constant":
        return on_maps(p, node, len(node.args[1]) // 2)
    labels = p.labels(node.args[0])
    varying = p.varying(labels)
    pad = node.args[1]
    amounts = [(0, 0)] * labels.dim()
    for i in range(len(pad) // 2):
        amounts[labels.dim() - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    if any(not isinstance(a, int) or a < 0 for dim in varying for a in amounts[dim]) or len(varying) > 1:
        raise Unsupported
    if not varying:
        return p.label(node, None, None)
    # The zeros that are padded onto channels are always there; a cut further on drops what nobody needs.
    (dim,) = varying
    ids = torch.nn.functional.pad(torch.from_numpy(p.along(node.args[0], dim)), amounts[dim])
    return p.label(node, dim, ids.numpy())


register(Operator(("pad", "constant_pad_nd"), channels=pad_channels, flops=nothing, samples_apart=SamplesApart.ALWAYS))
register(
    Operator(
        (
            "movedim",
            "swapaxes",
            "numpy_T",
            "mT",
            "flip",
            "pixel_shuffle",
            "pixel_unshuffle",
            "repeat",
            "repeat_interleave",
        ),
        channels=movement,
        flops=nothing,
    )
)
register(Operator(("sym_size",), flops=nothing, samples_apart=SamplesApart.ALWAYS))
