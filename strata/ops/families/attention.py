"""Scaled dot-product attention."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from strata.ops.bytes import NoRule
from strata.ops.channels import FxNode, Unsupported, Walk, argument
from strata.ops.flops import Count
from strata.ops.operator import Operator, register
from strata.ops.sized import SizedOp
from strata.ops.tape import Gradients, Shape, Simulation, Value


def channels(p: Walk, node: FxNode) -> Tensor:
    """Cut by whole heads: dim -3 of q, k and v."""
    q, k, v = node.args[:3]
    mask = argument(node, 3, "attn_mask")
    head = len(p.shape_of(q)) - 3
    if head < 1 or p.shape_of(k)[:-2] != p.shape_of(v)[:-2] or p.shape_of(q)[:head] != p.shape_of(k)[:head]:
        raise Unsupported  # no head dim
    queries, keys = p.shape_of(q)[head], p.shape_of(k)[head]
    shared, rest = divmod(queries, keys)
    if rest or (shared > 1 and not argument(node, 7, "enable_gqa", False)):
        raise Unsupported
    met = p.along(q, head) if shared == 1 else p.tie_groups(p.along(q, head), keys)  # queries that share a key
    for x in (k, v):
        met = p.meet(met, p.along(x, head))
    for x in (k, v):
        p.require(node, x, head, met)
    met = p.repeat(met, shared)
    p.require(node, q, head, met)
    if mask is not None:
        mask_head = len(p.shape_of(mask)) - 3
        if mask_head >= 0 and p.shape_of(mask)[mask_head] > 1:
            p.require(node, mask, mask_head, met)
    return p.label(node, head, met)


def step_bytes(
    sim: Simulation,
    op: SizedOp,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """The flash kernel, which torch takes on a CPU when there is no dropout; its output is stored position first."""
    shapes = [query.shape, key.shape, value.shape]
    same = all(len(shape) == 4 for shape in shapes) and len({(*shape[:2], shape[3]) for shape in shapes}) == 1
    if not same or dropout_p or enable_gqa or (attn_mask is not None and attn_mask.requires_grad):
        raise NoRule("attention that is not computed by the flash kernel")
    batch, heads, length, width = op.shape
    y = sim.new(op.shape, query.itemsize, _position_first(op.shape))
    saved, extra = [query, key, value, y], [sim.allocate(batch * heads * length * 4)]  # log-sum-exp
    if attn_mask is not None:
        if attn_mask.itemsize == 1:  # booleans become numbers to add
            extra.append(sim.allocate(prod(attn_mask.shape) * query.itemsize))
        else:
            saved.append(attn_mask)
    block = 32 if length < 192 else 64 if length < 768 else 256
    rows, columns = min(block, length), min(512, key.shape[2])
    sim.passing(4 * rows * (columns + 2 + width))

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        results: Gradients = [sim.new(v.shape, v.itemsize, _position_first(v.shape)) for v in (query, key, value)]
        sim.passing(2 * 4 * rows * columns)
        for index, v in enumerate((query, key, value)):
            result = results[index]
            if not v.requires_grad and result is not None:
                sim.drop(result)
                results[index] = None
        return results

    sim.record([query, key, value], y, saved, backward, extra)
    return y


def _position_first(shape: Shape) -> tuple[int, ...]:
    batch, heads, length, width = shape
    return (length * heads * width, width, heads * width, 1)


def flops(op: SizedOp, query: SizedOp, key: SizedOp, value: SizedOp, *_: Any) -> Count:
    # scores and their product with the values; backward recomputes the scores and makes four products
    scores = 2 * prod(query.shape) * key.shape[-2]
    values = 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]
    forward = scores + values
    backward = 3 * scores + 2 * values if op.requires_grad else 0
    return Count(attention_forward=forward, attention_train=forward + backward)


register(Operator(("scaled_dot_product_attention",), channels=channels, bytes=step_bytes, flops=flops))
