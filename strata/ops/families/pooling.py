"""Pooling, resampling and padding of maps: each channel on its own."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from strata.ops.channels import FxNode, Unsupported, Walk, family
from strata.ops.families.reductions import mean_bytes
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp
from strata.ops.tape import (
    Backward,
    Gradients,
    Simulation,
    Strides,
    Value,
    channels_last_strides,
    is_channels_last,
    lie_alike,
)


def channels(p: Walk, node: FxNode) -> Any:
    """Of [batch, channels, positions...]; how many dims the positions have is in the operator's name."""
    return on_maps(p, node, next(int(c) for c in family(node) if c.isdigit()))


def on_maps(p: Walk, node: FxNode, dims: int) -> Any:
    x = node.args[0]
    if len(p.shape_of(x)) != dims + 2 or set(p.varying(p.labels(x))) - {1}:
        raise Unsupported
    return p.label(node, 1, p.along(x, 1))


def _layout(op: SizedOp, x: Value) -> Strides:
    return channels_last_strides(op.shape) if is_channels_last(x.shape, x.strides) else None


def max_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize, _layout(op, x))
    size = prod(op.shape) * 8
    positions = sim.allocate(size)
    sim.record([x], y, [x], _backward(x, x.bytes + size), [positions])
    return y


def average_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize, _layout(op, x))
    sim.record([x], y, [x], _backward(x, x.bytes))
    return y


def _backward(x: Value, copied: int) -> Backward:
    """`copied`: where the gradient lies otherwise than the input did, bytes that are worked on as it lies."""

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        result = sim.new(x.shape, x.itemsize, x.strides)
        sim.passing(0 if lie_alike(gradient, x) else copied)
        return [result]

    return backward


def adaptive_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    if tuple(op.shape[-2:]) == (1, 1):
        return mean_bytes(sim, op, x)
    return average_bytes(sim, op, x)


def upsample_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        last = is_channels_last(gradient.shape, gradient.strides)
        return [sim.new(x.shape, x.itemsize, channels_last_strides(x.shape) if last else None)]

    layout = _layout(op, x)
    y = sim.new(op.shape, x.itemsize, layout)
    if layout is None:
        sim.passing(x.bytes + y.bytes)  # copies with channels last, which the kernel likes
    sim.record([x], y, [], backward)
    return y


_max = register(
    Operator(
        ("max_pool2d",),
        channels=channels,
        bytes=max_bytes,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="max_pooling",
    )
)
register(replace(_max, names=("avg_pool2d",), bytes=average_bytes, vectorised="average_pooling"))
register(replace(_max, names=("adaptive_avg_pool2d",), bytes=adaptive_bytes, vectorised="adaptive_average_pooling"))
register(replace(_max, names=("adaptive_max_pool2d",), bytes=None, vectorised="adaptive_max_pooling"))
register(Operator(("upsample_nearest2d",), channels=channels, bytes=upsample_bytes, bytes_for=("vec",), flops=nothing))
register(
    Operator(
        (
            "avg_pool1d",
            "avg_pool3d",
            "max_pool1d",
            "max_pool3d",
            "max_pool2d_with_indices",
            "adaptive_avg_pool1d",
            "adaptive_avg_pool3d",
            "adaptive_max_pool1d",
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d",
            "upsample_nearest1d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "_upsample_bilinear2d_aa",
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
        ),
        channels=channels,
        flops=nothing,
    )
)
