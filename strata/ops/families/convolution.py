"""Convolutions, and transposed ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from strata.ops.channels import FxNode, Unsupported, Walk, argument, family
from strata.ops.flops import Count, product
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.resize import Along, Call, unchanged
from strata.ops.sized import SizedOp
from strata.ops.tape import Gradients, Simulation, Value, channels_last_strides, is_channels_last


def channels(p: Walk, node: FxNode) -> Tensor:
    name = family(node)
    if name == "convolution" and node.args[6]:
        raise Unsupported  # transposed
    groups = node.args[8] if name == "convolution" else argument(node, 6, "groups", 1)
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    spatial = p.shape_of(weight)[2:]
    if len(p.shape_of(x)) != len(spatial) + 2 or not isinstance(groups, int):
        raise Unsupported  # unbatched, or a kernel of its own for each sample
    ids_in = p.along(x, 1)
    if p.is_state(weight) and not p.is_parameter(weight) and groups == len(ids_in):
        out = p.repeat(ids_in, p.shape_of(weight)[0] // groups)  # a fixed filter, on each channel alike
        p.set_state(weight, 0, out)
        p.require(node, x, 1, ids_in)
    elif groups == 1:
        out = p.source(node, weight, 0)
        p.set_state(weight, 1, ids_in)
        p.require(node, x, 1, ids_in)
    else:
        channels_in, channels_out = len(ids_in), p.shape_of(weight)[0]
        grouped = p.tie_groups(ids_in, groups)
        own = p.source(node, weight, 0, groups=groups)
        met = p.meet(grouped, own[:: channels_out // groups])
        out = p.repeat(met, channels_out // groups)
        p.set_state(weight, 0, out)
        p.require(node, x, 1, p.repeat(met, channels_in // groups))
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, 1, out)


def transposed_channels(p: Walk, node: FxNode) -> Tensor:
    if argument(node, 6, "groups", 1) != 1:
        raise Unsupported
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    ids_in = p.along(x, 1)
    out = p.source(node, weight, 1)
    p.set_state(weight, 0, ids_in)
    p.require(node, x, 1, ids_in)
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, 1, out)


def fewer_groups(node: FxNode, before: Along | None, after: Along | None) -> Call:
    position = 8 if family(node) == "convolution" else 6
    groups = argument(node, position, "groups", 1)
    if groups == 1 or before is None:
        return unchanged(node)
    kept = groups * before.kept // len(before.mask)
    if position < len(node.args):
        return Call(node.target, (*node.args[:position], kept, *node.args[position + 1 :]), dict(node.kwargs))
    return Call(node.target, node.args, {**node.kwargs, "groups": kept})


def step_bytes(
    sim: Simulation,
    op: SizedOp,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    channels_last = is_channels_last(x.shape, x.strides) or is_channels_last(weight.shape, weight.strides)
    columns = 0
    if not _by_onednn(x, weight, stride, dilation, groups):
        # torch's own convolution unfolds the whole batch, unless the kernel is a single pixel
        if any(k != 1 for k in weight.shape[2:]) or any(p not in (0, "valid") for p in _several(padding)):
            columns = prod(weight.shape[1:]) * prod(op.shape[2:]) * x.shape[0] * x.itemsize
    layout = channels_last_strides if channels_last and len(op.shape) == 4 else None
    y = sim.new(op.shape, x.itemsize, layout(op.shape) if layout else None)
    if columns:
        sim.passing(columns)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        results: Gradients = [None, None, None]
        if needs[0]:
            results[0] = sim.new(x.shape, x.itemsize, layout(x.shape) if layout else None)
            if columns:
                sim.passing(columns)
        if needs[1]:
            results[1] = sim.new(weight.shape, weight.itemsize, layout(weight.shape) if layout else weight.strides)
            if columns:
                sim.passing(columns)
        if bias is not None and needs[2]:
            results[2] = sim.new(bias.shape, bias.itemsize)
        return results

    needs = [v is not None and v.requires_grad for v in (x, weight, bias)]
    sim.record([x, weight, bias], y, [x, weight], backward)
    return y


def _by_onednn(x: Value, weight: Value, stride: Any, dilation: Any, groups: int) -> bool:
    """torch's own choice of kernel on one thread (ConvParams::use_mkldnn)."""
    if x.itemsize > 4:
        return False
    batch = x.shape[0]
    plain = set(_several(stride)) == {1} and set(_several(dilation)) == {1}
    kernel = weight.shape[2:]
    if plain and batch < 16 and kernel[-1] == 1 and kernel[-2 if len(kernel) > 1 else -1] == 1:
        return False
    return groups > 1 or min(kernel) > 3 or batch > 1 or prod(x.shape) > 20480


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def flops(op: SizedOp, x: SizedOp, weight: SizedOp, *_: Any) -> Count:
    # each output position meets the whole kernel; weight.shape[1] is channels per group already
    forward = 2 * prod(weight.shape) * op.shape[0] * prod(op.shape[2:])
    return _with_groups(product(forward, x, weight), weight, x.shape[1] // weight.shape[1])


def transposed_flops(op: SizedOp, x: SizedOp, weight: SizedOp, *_: Any) -> Count:
    forward = 2 * prod(weight.shape) * x.shape[0] * prod(x.shape[2:])
    groups = x.shape[1] // weight.shape[0] * (op.shape[1] // weight.shape[1])
    return _with_groups(product(forward, x, weight), weight, groups)


def _with_groups(count: Count, weight: SizedOp, groups: int) -> Count:
    if groups == 1 or not weight.requires_grad:
        return count
    excess = count.forward * (groups - 1)
    return count._replace(train=count.train + excess, grouped_excess=excess)


_two_dims = register(
    Operator(
        ("conv2d",),
        channels=channels,
        resize=fewer_groups,
        bytes=step_bytes,
        flops=flops,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="convolution",
    )
)
register(replace(_two_dims, names=("conv1d",), bytes_for=("default",), vectorised=None))
register(replace(_two_dims, names=("conv3d",), bytes=None, vectorised=None))
register(replace(_two_dims, names=("convolution",), bytes=None, flops=None, vectorised=None))
register(
    Operator(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        channels=transposed_channels,
        flops=transposed_flops,
    )
)
