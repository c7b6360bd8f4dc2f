"""Pooling, resampling and padding of maps: each channel on its own."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from strata.ops.bytes import fresh, plain
from strata.ops.channels import FxNode, Unsupported, Walk, family
from strata.ops.families.reductions import mean_bytes
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp
from strata.ops.tape import Simulation, Strides, Value, channels_last_strides, is_channels_last


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
    positions = sim.allocate(prod(op.shape) * 8)
    sim.record([x], y, [x], fresh(x), [positions])
    return y


def average_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize, _layout(op, x))
    sim.record([x], y, [x], fresh(x))
    return y


def adaptive_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    if tuple(op.shape[-2:]) == (1, 1):
        return mean_bytes(sim, op, x)
    return average_bytes(sim, op, x)


def upsample_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.passing(x.bytes + y.bytes)  # both in the kernel's own layout
    sim.record([x], y, [], fresh(plain(x)))
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
