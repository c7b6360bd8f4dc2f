"""Convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

from math import prod
from typing import Any

from strata.ops.bytes.base import (
    NoRule,
    aten,
    fresh,
    plain,
    rule,
)
from strata.ops.tape import (
    Gradients,
    Shape,
    Simulation,
    Value,
    channels_last_strides,
    is_channels_last,
)

# convolution, linear, matrix products


@rule(aten.conv2d.default, aten.conv1d.default, aten.conv2d.padding)
def conv(
    sim: Simulation,
    op: Any,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    return _convolution(sim, op, x, weight, bias, stride, padding, dilation, groups)


@rule(aten.conv_transpose2d.input)
def conv_transpose(
    sim: Simulation,
    op: Any,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    if any(p >= min(_pair(stride)) for p in _pair(output_padding)):
        raise NoRule("transposed convolution with large output padding")
    return _convolution(sim, op, x, weight, bias, stride, padding, dilation, groups, transposed=True)


def _convolution(
    sim: Simulation,
    op: Any,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
) -> Value:
    channels_last = is_channels_last(x.shape, x.strides) or is_channels_last(weight.shape, weight.strides)
    columns = 0
    if not _by_onednn(x, weight, stride, dilation, groups):
        if transposed:
            raise NoRule("transposed convolution outside oneDNN")
        # torch's own convolution unfolds the whole batch, unless the kernel is a single pixel
        if any(k != 1 for k in weight.shape[2:]) or any(p not in (0, "valid") for p in _pair(padding)):
            columns = prod(weight.shape[1:]) * prod(op.shape[2:]) * x.shape[0] * x.itemsize
        channels_last = False
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
    plain = set(_pair(stride)) == {1} and set(_pair(dilation)) == {1}
    kernel = weight.shape[2:]
    if plain and batch < 16 and kernel[-1] == 1 and kernel[-2 if len(kernel) > 1 else -1] == 1:
        return False
    return groups > 1 or min(kernel) > 3 or batch > 1 or prod(x.shape) > 20480


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@rule(aten.linear.default)
def linear(sim: Simulation, op: Any, x: Value, weight: Value, bias: Value | None = None) -> Value:
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
            results[1] = sim.new(weight.shape, weight.itemsize)
        if needs[2] and bias is not None:
            results[2] = sim.new(bias.shape, bias.itemsize)
        return results

    saved = ([flat] if needs[1] else []) + ([weight] if needs[0] else [])
    sim.record([x, weight, bias], y, saved, backward)
    sim.drop(flat)
    return y


@rule(aten.mm.default, aten.bmm.default)
def bmm(sim: Simulation, op: Any, a: Value, b: Value) -> Value:
    y = sim.new(op.shape, a.itemsize)
    sim.record([a, b], y, [v for v, other in ((b, a), (a, b)) if other.requires_grad], fresh(plain(a), plain(b)))
    return y


@rule(aten.addmm.default)
def addmm(sim: Simulation, op: Any, bias: Value, a: Value, b: Value) -> Value:
    y = sim.new(op.shape, a.itemsize)
    saved = [v for v, other in ((b, a), (a, b)) if other.requires_grad]
    sim.record([bias, a, b], y, saved, fresh(bias, plain(a), plain(b)))
    return y


@rule(aten.matmul.default)
def matmul(sim: Simulation, op: Any, a: Value, b: Value) -> Value:
    if len(a.shape) < 3 or len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2]:
        if len(a.shape) == 2 and len(b.shape) == 2:
            return bmm(sim, op, a, b)
        raise NoRule("matmul with broadcasting")
    stacks = [sim.reshape(v, (prod(v.shape[:-2]), *v.shape[-2:])) for v in (a, b)]
    y = sim.new(op.shape, a.itemsize)
    needs = [v.requires_grad for v in (a, b)]
    saved = [stack for stack, need in zip(reversed(stacks), needs, strict=True) if need]
    sim.record([a, b], y, saved, fresh(plain(a), plain(b), whole=False))
    for stack in stacks:
        sim.drop(stack)
    return y


@rule(aten.scaled_dot_product_attention.default)
def attention(
    sim: Simulation,
    op: Any,
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
    same = query.shape[:2] == key.shape[:2] == value.shape[:2] and query.shape[3] == key.shape[3] == value.shape[3]
    if (
        len(query.shape) != 4
        or dropout_p
        or enable_gqa
        or not same
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
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
