"""Linear layers and products of matrices."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from strata.ops.bytes import NoRule, fresh, plain, share
from strata.ops.channels import FxNode, Unsupported, Walk, argument
from strata.ops.flops import Count, product
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp
from strata.ops.tape import Gradients, Simulation, Value

# --- linear ------------------------------------------------------------------------------------------------------


def linear_channels(p: Walk, node: FxNode) -> Tensor:
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    if len(p.shape_of(weight)) != 2:
        raise Unsupported
    last = len(p.shape_of(x)) - 1
    elsewhere = set(p.varying(p.labels(x))) - {last}
    if len(elsewhere) == 1 and last not in p.varying(p.labels(x)):
        p.fixed_source(node, weight)  # mixes another dim than the channels, e.g. tokens, in each channel alike
        (dim,) = elsewhere
        return p.label(node, dim, p.along(x, dim))
    if elsewhere:
        raise Unsupported
    ids_in = p.along(x, last)
    out = p.source(node, weight, 0)
    p.set_state(weight, 1, ids_in)
    p.require(node, x, last, ids_in)
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, last, out)


def linear_bytes(sim: Simulation, op: SizedOp, x: Value, weight: Value, bias: Value | None = None) -> Value:
    features = x.shape[-1]
    flat = sim.reshape(x, (prod(x.shape[:-1]), features))  # a copy if x is laid out otherwise
    y = sim.new(op.shape, x.itemsize)
    rows = (prod(op.shape[:-1]), op.shape[-1])
    needs = [v is not None and v.requires_grad for v in (x, weight, bias)]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        gradient = gradients[0]
        assert gradient is not None
        flat = sim.reshape(gradient, rows)
        sim.drop(gradient)
        gradients[0] = flat
        results: Gradients = [None, None, None]
        if needs[0]:
            results[0] = result = sim.new(x.shape, x.itemsize)
            result.whole = len(x.shape) == 2  # else the product of matrices is seen through a view
        if needs[1]:
            results[1] = result = sim.new(weight.shape, weight.itemsize)
            result.whole = False  # it comes through the transposed weight
        if needs[2] and bias is not None:
            results[2] = sim.new(bias.shape, bias.itemsize)
        return results

    saved = ([flat] if needs[1] else []) + ([weight] if needs[0] else [])
    sim.record([x, weight, bias], y, saved, backward)
    sim.drop(flat)
    return y


def linear_flops(op: SizedOp, x: SizedOp, weight: SizedOp, *_: Any) -> Count:
    return product(2 * prod(x.shape) * weight.shape[0], x, weight)


# --- matmul, bmm, mm ---------------------------------------------------------------------------------------------


def matmul_channels(p: Walk, node: FxNode) -> Tensor:
    a, b = node.args[0], node.args[1]
    if p.is_state(a) or p.is_state(b):
        raise Unsupported
    rank = len(p.shape_of(a))
    if rank < 3 or len(p.shape_of(b)) != rank:
        raise Unsupported
    varying_a, varying_b = set(p.varying(p.labels(a))), set(p.varying(p.labels(b)))
    batch = {d for d in varying_a | varying_b if d < rank - 2}
    if len(batch) > 1:
        raise Unsupported
    if batch:  # heads: what varies within a head is tied to it
        (head,) = batch
        if p.shape_of(a)[head] != p.shape_of(b)[head]:
            raise Unsupported  # one head of keys for all queries
        met = p.meet(p.along(a, head), p.along(b, head))
        p.require(node, a, head, met)
        p.require(node, b, head, met)
        return p.label(node, head, met)
    met = p.meet(p.along(a, rank - 1, tie=False), p.along(b, rank - 2, tie=False))  # refuses all but summed channels
    p.require(node, a, rank - 1, met)
    p.require(node, b, rank - 2, met)
    return p.label(node, None, None)


def bmm_bytes(sim: Simulation, op: SizedOp, a: Value, b: Value) -> Value:
    y = sim.new(op.shape, a.itemsize)
    sim.record([a, b], y, [v for v, other in ((b, a), (a, b)) if other.requires_grad], fresh(plain(a), plain(b)))
    return y


def matmul_bytes(sim: Simulation, op: SizedOp, a: Value, b: Value) -> Value:
    if len(a.shape) < 3 or len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2]:
        if len(a.shape) == 2 and len(b.shape) == 2:
            return bmm_bytes(sim, op, a, b)
        raise NoRule("matmul with broadcasting")
    stacks = [sim.reshape(v, (prod(v.shape[:-2]), *v.shape[-2:])) for v in (a, b)]
    y = sim.new(op.shape, a.itemsize)
    needs = [v.requires_grad for v in (a, b)]
    saved = [stack for stack, need in zip(reversed(stacks), needs, strict=True) if need]
    sim.record([a, b], y, saved, fresh(plain(a), plain(b), whole=False))
    for stack in stacks:
        sim.drop(stack)
    return y


def matmul_flops(op: SizedOp, a: SizedOp, b: SizedOp, *_: Any) -> Count:
    return product(2 * prod(op.shape) * a.shape[-1], a, b)


# --- addmm -------------------------------------------------------------------------------------------------------


def addmm_channels(p: Walk, node: FxNode) -> Tensor:
    """GPT-2's linear layer, whose weight is [in, out]; samples and positions are one dim."""
    bias, x, weight = node.args[:3]
    if p.is_state(x) or not p.is_state(bias) or len(p.shape_of(bias)) != 1 or p.varying(p.labels(x)) not in ([], [1]):
        raise Unsupported
    ids_in = p.along(x, 1)
    out = p.source(node, weight, 1)
    p.set_state(weight, 0, ids_in)
    p.require(node, x, 1, ids_in)
    p.set_state(bias, 0, out)
    return p.label(node, 1, out)


def addmm_bytes(
    sim: Simulation, op: SizedOp, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1
) -> Value:
    if beta != 1 or alpha != 1:
        raise NoRule("a product that is scaled")
    y = sim.new(op.shape, a.itemsize)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        first = share(sim, gradients[0]) if bias.requires_grad else None  # summed up to its size afterwards
        made = [sim.new(v.shape, v.itemsize) if v.requires_grad else None for v in (a, b)]
        return [first, *made]

    sim.record([bias, a, b], y, [v for v, other in ((b, a), (a, b)) if other.requires_grad], backward)
    return y


def addmm_flops(op: SizedOp, bias: SizedOp, a: SizedOp, b: SizedOp, *_: Any) -> Count:
    return matmul_flops(op, a, b)


register(
    Operator(
        ("linear",),
        channels=linear_channels,
        bytes=linear_bytes,
        flops=linear_flops,
        samples_apart=SamplesApart.ALWAYS,
        vectorised="linear",
    )
)
_matmul = register(Operator(("matmul",), channels=matmul_channels, bytes=matmul_bytes, flops=matmul_flops))
_bmm = register(replace(_matmul, names=("bmm",), bytes=bmm_bytes))
register(replace(_bmm, names=("mm",), channels=None, bytes_for=("default",)))
_baddbmm = register(Operator(("baddbmm",), flops=addmm_flops))
register(replace(_baddbmm, names=("addmm",), channels=addmm_channels, bytes=addmm_bytes, bytes_for=("default",)))
