"""Tensors side by side: cat and stack; and the elements that a cut takes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from strata.ops.bytes import fresh, plain
from strata.ops.channels import FxNode, Unsupported, Walk, argument
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp, itemsize
from strata.ops.tape import (
    Gradients,
    Simulation,
    Value,
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
)


def cat_channels(p: Walk, node: FxNode) -> Tensor:
    inputs = node.args[0]
    labels = [p.labels(x) for x in inputs]
    dim = argument(node, 1, "dim", 0) % labels[0].dim()
    others = {d for one in labels for d in p.varying(one)} - {dim}
    if others:
        # Side by side along another dim (a class token before patches): operands must agree in their channels. What
        # varies along both (rotary positions: halves of each head) is tied within a head.
        if len(others) > 1:
            raise Unsupported
        (channel,) = others
        if any(dim in p.varying(one) for one in labels):
            rows = np.stack([p.along(x, channel) for x in inputs], axis=1)
            met = p.tie_groups(rows.reshape(-1), len(rows))
        else:
            met = p.along(inputs[0], channel)
            for x in inputs[1:]:
                met = p.meet(met, p.along(x, channel))
        for x in inputs:
            p.require(node, x, channel, met)
        return p.label(node, channel, met)
    out: Tensor = p.run(node)
    p.concatenated(out)
    return out


def cat_bytes(sim: Simulation, op: SizedOp, tensors: Sequence[Value], dim: int = 0) -> Value:
    channels_last = all(is_channels_last(v.shape, v.strides) for v in tensors)
    y = sim.new(op.shape, itemsize(op), channels_last_strides(op.shape) if channels_last else None)
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


def stack_channels(p: Walk, node: FxNode) -> Tensor:
    inputs = node.args[0]
    dim = argument(node, 1, "dim", 0) % (p.labels(inputs[0]).dim() + 1)
    joined = p.join(node, list(inputs), shape=p.shape_of(inputs[0]))
    return joined.unsqueeze(dim).expand(p.shape_of(node))


def index_select_bytes(sim: Simulation, op: SizedOp, x: Value, dim: int, index: Any) -> Value:
    whole = sim.contiguous(x)  # it reads a copy of what lies otherwise, such as channels last
    y = sim.new(op.shape, x.itemsize)
    sim.drop(whole)
    sim.record([x], y, [index] if isinstance(index, Value) else [], fresh(plain(x)))
    return y


register(
    Operator(
        ("cat",),
        channels=cat_channels,
        bytes=cat_bytes,
        bytes_for=("default",),
        flops=nothing,
        samples_apart=SamplesApart.UNLESS_ALONG_BATCH,
        vectorised="concatenation",
    )
)
register(
    Operator(("concat", "concatenate"), channels=cat_channels, bytes=cat_bytes, bytes_for=("default",), flops=nothing)
)
register(Operator(("stack",), channels=stack_channels, flops=nothing))
register(Operator(("index_select",), bytes=index_select_bytes, flops=nothing))
