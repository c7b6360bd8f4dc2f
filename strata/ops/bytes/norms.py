"""Norms, pooling, reductions, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from strata.ops.bytes.base import (
    aten,
    fresh,
    itemsize,
    plain,
    rule,
)
from strata.ops.tape import (
    Backward,
    Gradients,
    Simulation,
    Value,
    channels_last_strides,
    is_channels_last,
)

# norms


@rule(aten.batch_norm.default)
def batch_norm(
    sim: Simulation,
    op: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    *_: Any,
) -> Value:
    channels = x.shape[1]
    y = sim.new(op.shape, x.itemsize, x.strides)
    statistics = [sim.allocate(channels * 4), sim.allocate(channels * 4)] if training else []
    sim.passing(2 * channels * 4)  # scale and shift
    saved = [v for v in (x, weight, running_mean, running_var) if v is not None]
    # the input's gradient is built in two tensors
    sim.record(
        [x, weight, bias], y, saved, _norm_backward(x, weight, bias, x.bytes if x.requires_grad else 0), statistics
    )
    return y


@rule(aten.layer_norm.default)
def layer_norm(
    sim: Simulation,
    op: Any,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    *_: Any,
    **__: Any,
) -> Value:
    features = prod(normalized)
    rows = prod(x.shape) // features
    whole = sim.contiguous(x)
    y = sim.new(op.shape, x.itemsize)
    statistics = [sim.allocate(rows * 4), sim.allocate(rows * 4)]
    sim.drop(whole)
    saved = [v for v in (x, weight, bias) if v is not None]
    backward = _norm_backward(x, weight, bias, 2 * features * 4, contiguous=True)
    sim.record([x, weight, bias], y, saved, backward, statistics)
    return y


@rule(aten.group_norm.default)
def group_norm(
    sim: Simulation,
    op: Any,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    *_: Any,
    **__: Any,
) -> Value:
    batch, channels = x.shape[:2]
    y = sim.new(op.shape, x.itemsize, x.strides)
    statistics = [sim.allocate(batch * groups * 4), sim.allocate(batch * groups * 4)]
    saved = [v for v in (x, weight) if v is not None]
    # two sums per sample and channel
    backward = _norm_backward(x, weight, bias, 2 * batch * channels * 4)
    sim.record([x, weight, bias], y, saved, backward, statistics)
    return y


def _norm_backward(
    x: Value, weight: Value | None, bias: Value | None, temporary: int, contiguous: bool = False
) -> Backward:
    needs = [v is not None and v.requires_grad for v in (x, weight, bias)]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        held = []
        if contiguous:
            held = [sim.contiguous(gradient), sim.contiguous(x)]
        results: Gradients = [None, None, None]
        for index, v in enumerate((x, weight, bias)):
            if v is not None and needs[index]:
                results[index] = sim.new(v.shape, v.itemsize, None if contiguous else v.strides)
        sim.passing(temporary)
        for v in held:
            sim.drop(v)
        return results

    return backward


# pooling, reductions, softmax


@rule(aten.max_pool2d.default)
def max_pool(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    strides = channels_last_strides(op.shape) if is_channels_last(x.shape, x.strides) else None
    y = sim.new(op.shape, x.itemsize, strides)
    positions = sim.allocate(prod(op.shape) * 8)
    sim.record([x], y, [x], fresh(x), [positions])
    return y


@rule(aten.avg_pool2d.default)
def avg_pool(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    strides = channels_last_strides(op.shape) if is_channels_last(x.shape, x.strides) else None
    y = sim.new(op.shape, x.itemsize, strides)
    sim.record([x], y, [x], fresh(x))
    return y


@rule(aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if tuple(op.shape[-2:]) == (1, 1):
        return mean(sim, op, x)
    return avg_pool(sim, op, x)


@rule(aten.mean.dim, aten.mean.default)
def mean(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], fresh(plain(x)))
    return y


@rule(aten.sum.dim_IntList, aten.sum.default)
def sum_(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, itemsize(op))

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.view(gradient, x.shape, (0,) * len(x.shape))]  # expanded, not copied

    sim.record([x], y, [], backward)
    return y


@rule(aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default)
def softmax(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [y], fresh(plain(x)))
    return y
