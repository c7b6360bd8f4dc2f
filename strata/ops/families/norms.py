"""Norms, and what else has a number per channel: prelu."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from strata.ops.channels import FxNode, Unsupported, Walk, argument, family
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.resize import Along, Call
from strata.ops.sized import SizedOp
from strata.ops.tape import Backward, Gradients, Simulation, Value, is_channels_last, lie_alike

# --- batch norm --------------------------------------------------------------------------------------------------


def batch_norm_channels(p: Walk, node: FxNode) -> Tensor:
    ids = p.along(node.args[0], 1)
    p.require(node, node.args[0], 1, ids)
    for state in node.args[1:5]:
        if state is not None:
            p.set_state(state, 0, ids)
    return p.label(node, 1, ids)


def batch_norm_bytes(
    sim: Simulation,
    op: SizedOp,
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
    # the input's gradient is built in two tensors, unless what it is built from does not lie alike
    backward = _norm_backward(x, weight, bias, x.bytes if x.requires_grad else 0, otherwise=0)
    sim.record([x, weight, bias], y, saved, backward, statistics)
    return y


# --- layer norm --------------------------------------------------------------------------------------------------


def layer_norm_channels(p: Walk, node: FxNode) -> Tensor:
    x, normalised = node.args[0], node.args[1]
    labels = p.labels(x)
    first = labels.dim() - len(normalised)
    heads = [dim for dim in p.varying(labels) if dim < first]
    if heads:  # a norm within each head, which is kept or dropped whole
        if len(heads) > 1:
            raise Unsupported
        p.along(x, heads[0])
        return labels
    for state in (argument(node, 2, "weight"), argument(node, 3, "bias") if family(node) == "layer_norm" else None):
        if state is not None:
            for dim in range(len(normalised)):
                p.set_state(state, dim, p.along(x, first + dim, tie=False))
    return labels


def normalised_shape(node: FxNode, before: Along | None, after: Along | None) -> Call:
    assert before is not None
    shape = node.args[1]
    sizes = list(shape)
    first = len(node.meta["val"].shape) - len(sizes)
    if before.dim >= first:
        sizes[before.dim - first] = before.kept
    return Call(node.target, (node.args[0], sizes, *node.args[2:]), dict(node.kwargs))


def layer_norm_bytes(
    sim: Simulation,
    op: SizedOp,
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


# --- group norm --------------------------------------------------------------------------------------------------


def group_norm_channels(p: Walk, node: FxNode) -> Tensor:
    x, groups = node.args[0], node.args[1]
    ids = p.along(x, 1)
    tied = p.repeat(p.tie_groups(ids, groups), len(ids) // groups)
    p.require(node, x, 1, tied)
    for state in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        if state is not None:
            p.set_state(state, 0, tied)
    return p.label(node, 1, tied)


def fewer_groups(node: FxNode, before: Along | None, after: Along | None) -> Call:
    assert before is not None
    groups = node.args[1]
    kept = groups * before.kept // len(before.mask)
    return Call(node.target, (node.args[0], kept, *node.args[2:]), dict(node.kwargs))


def group_norm_bytes(
    sim: Simulation,
    op: SizedOp,
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
    sums = 2 * batch * channels * 4  # two per sample and channel
    if is_channels_last(x.shape, x.strides):
        sim.passing(sums)
    backward = _norm_backward(x, weight, bias, sums, otherwise=sums + x.bytes)
    sim.record([x, weight, bias], y, saved, backward, statistics)
    return y


def _norm_backward(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    temporary: int,
    otherwise: int | None = None,
    contiguous: bool = False,
) -> Backward:
    """`temporary`: bytes beside the results; `otherwise`: if the gradient does not lie as the input did."""
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
        sim.passing(temporary if otherwise is None or lie_alike(gradient, x) else otherwise)
        for v in held:
            sim.drop(v)
        return results

    return backward


# --- prelu -------------------------------------------------------------------------------------------------------


def prelu_channels(p: Walk, node: FxNode) -> Tensor:
    x, slope = node.args[0], node.args[1]
    if p.shape_of(slope) not in ((), (1,)):
        p.set_state(slope, 0, p.along(x, 1))
    return p.labels(x)


# In evaluation, where batches are computed in parts, whoever does so takes care of a batch norm's statistics.
register(
    Operator(
        ("batch_norm",),
        channels=batch_norm_channels,
        bytes=batch_norm_bytes,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="batch_norm",
    )
)
register(Operator(("instance_norm",), channels=batch_norm_channels, flops=nothing))
register(
    Operator(
        ("layer_norm",),
        channels=layer_norm_channels,
        resize=normalised_shape,
        bytes=layer_norm_bytes,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
    )
)
register(Operator(("rms_norm",), channels=layer_norm_channels, resize=normalised_shape, flops=nothing))
register(
    Operator(
        ("group_norm",),
        channels=group_norm_channels,
        resize=fewer_groups,
        bytes=group_norm_bytes,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="group_norm",
    )
)
register(Operator(("prelu",), channels=prelu_channels, flops=nothing))
