"""Sums, means and extremes over dims; softmax, which keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from strata.ops.bytes import fresh, plain
from strata.ops.channels import FxNode, Unsupported, Walk, argument, elementwise, named
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp, itemsize
from strata.ops.tape import Gradients, Simulation, Value


def channels(p: Walk, node: FxNode) -> Any:
    x = node.args[0]
    if isinstance(argument(node, 1, "dim"), fx.Node):
        return elementwise(p, node)  # max(a, b)
    labels = p.labels(x)
    if not labels.dim():
        return p.label(node, None, None)
    dims = named(node, "dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = list(range(labels.dim()))
    dims = [d % labels.dim() for d in ([dims] if isinstance(dims, int) else dims)]
    keepdim = named(node, "keepdim", False)
    varying = p.varying(labels)
    left = [d for d in varying if d not in dims]
    if not left:
        return p.label(node, None, None)  # reduced over the kept ones; the result is always there
    if len(left) > 1:
        raise Unsupported
    (dim,) = left  # what is reduced within a head is tied to it
    return p.label(node, dim if keepdim else dim - sum(d < dim for d in dims), p.along(x, dim))


def mean_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], fresh(plain(x)))
    return y


def sum_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, itemsize(op))

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.view(gradient, x.shape, (0,) * len(x.shape))]  # expanded, not copied

    sim.record([x], y, [], backward)
    return y


def softmax_bytes(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        held = sim.contiguous(gradient)
        result = sim.new(x.shape, x.itemsize)
        sim.drop(held)
        return [result]

    held = sim.contiguous(x)
    y = sim.new(op.shape, x.itemsize)
    sim.drop(held)
    sim.record([x], y, [y], backward)
    return y


_mean = register(
    Operator(
        ("mean",),
        channels=channels,
        bytes=mean_bytes,
        bytes_for=("dim", "default"),
        flops=nothing,
        samples_apart=SamplesApart.UNLESS_ALONG_BATCH,
        vectorised="mean",
    )
)
register(replace(_mean, names=("sum",), bytes=sum_bytes, bytes_for=("dim_IntList", "default"), vectorised=None))
register(replace(_mean, names=("amax",), bytes=None, bytes_for=(), vectorised=None))
register(
    Operator(
        (
            "amin",
            "max",
            "min",
            "var",
            "std",
            "logsumexp",
            "norm",
            "linalg_vector_norm",
            "prod",
            "var_mean",
            "std_mean",
            "all",
            "any",
        ),
        channels=channels,
        flops=nothing,
    )
)
# Over the channels that are kept: the element that a cut drops has no share
register(
    Operator(
        ("softmax", "log_softmax"),
        channels=elementwise,
        bytes=softmax_bytes,
        bytes_for=("int",),
        flops=nothing,
        samples_apart=SamplesApart.UNLESS_ALONG_BATCH,
    )
)
register(
    Operator(
        ("_softmax", "_log_softmax"),
        channels=elementwise,
        flops=nothing,
        samples_apart=SamplesApart.UNLESS_ALONG_BATCH,
    )
)
