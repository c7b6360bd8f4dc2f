"""What each operator allocates, saves and hands back, on a CPU in eager mode: one rule per aten operator.

A rule gets the simulation, the SizedOp and the operator's arguments with tensors as `Value`s; it returns the result.
Results hold a reference of their own; what a rule makes and does not return or save it must drop. The saved tensors
are those of torch's derivatives.yaml. Temporaries of library calls (oneDNN, BLAS) are not counted, see measured.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from strata.costs.autograd import (
    Backward,
    Gradients,
    Shape,
    Simulation,
    Strides,
    Value,
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    is_channels_last,
)

aten = torch.ops.aten
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


class NoRule(Exception):
    """The closed form does not know this operator (or this use of it); trace it instead."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


# what backward does: small constructors


def fresh(*inputs: Value | None, temporary: int = 0) -> Backward:
    """A new gradient for each input that requires one, all alive at once, plus a temporary."""
    wanted = [(v.shape, v.itemsize, v.strides) if v is not None and v.requires_grad else None for v in inputs]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        results = [None if w is None else sim.new(*w) for w in wanted]
        if temporary:
            sim.passing(temporary)
        return results

    return backward


def share(sim: Simulation, gradient: Value | None) -> Value | None:
    if gradient is not None:
        gradient.uses += 1
    return gradient


def unary_fresh(x: Value) -> Backward:
    """Elementwise backward: one new tensor, laid out as its operands are."""

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.new(x.shape, x.itemsize, elementwise_strides(x, gradient))]

    return backward


def _pass(sim: Simulation, gradients: Gradients) -> Gradients:
    return [share(sim, gradients[0])]


# elementwise, one input


def _unary(saves: str) -> Rule:
    def forward(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
        y = sim.new(op.shape, itemsize(op), elementwise_strides(x))
        if op.dtype.is_floating_point:
            sim.record([x], y, {"self": [x], "result": [y], "": []}[saves], unary_fresh(x))
        return y

    return forward


def _unary_in_place(saves: str) -> Rule:
    def forward(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
        extra = []
        if saves == "self" and x.requires_grad:
            extra = [sim.allocate(x.bytes)]  # the operator overwrites what its backward needs: autograd keeps a clone
        return _overwrite(sim, x, [x], [x] if saves == "result" else [], unary_fresh(x), extra)

    return forward


def _overwrite(
    sim: Simulation, x: Value, inputs: Sequence[Value | None], saved: list[Value], backward: Backward, extra: list[int]
) -> Value:
    """An in-place operator: the variable itself and the result are the same tensor with a new history."""
    if x.storage in sim.viewed:
        backward = _copied_slices(backward, x.bytes)
    y = sim.view(x, x.shape, x.strides)
    if sim.record(inputs, y, saved, backward, extra):
        x.requires_grad, x.node, x.port, x.parameter = True, y.node, y.port, False
    return y


def _copied_slices(backward: Backward, size: int) -> Backward:
    """Where views of an overwritten tensor exist, autograd works on copies of the gradient (CopySlices)."""

    def copied(sim: Simulation, gradients: Gradients) -> Gradients:
        copies = [sim.allocate(size), sim.allocate(size)]
        results = backward(sim, gradients)
        for copy in copies:
            sim.release(copy)
        return results

    return copied


for name in ("hardtanh", "silu", "hardswish", "hardsigmoid", "mish", "softplus", "clamp", "abs", "log"):
    RULES[getattr(aten, name).default] = _unary("self")
for name in ("hardtanh", "silu", "hardswish", "hardsigmoid", "mish", "clamp"):
    RULES[getattr(aten, name + "_").default] = _unary_in_place("self")
for name in ("gelu", "leaky_relu", "elu", "relu6", "selu", "celu", "clamp_min"):
    RULES[getattr(aten, name).default] = _unary("self")
for name in ("relu", "sigmoid", "tanh", "exp"):
    RULES[getattr(aten, name).default] = _unary("result")
for name in ("relu", "sigmoid", "tanh", "leaky_relu", "elu"):
    RULES[getattr(aten, name + "_").default] = _unary_in_place("result")
RULES[aten.relu6_.default] = _unary_in_place("self")
RULES[aten.neg.default] = _unary("")


@rule(aten.clone.default, aten.contiguous.default)
def clone(sim: Simulation, op: Any, x: Value, memory_format: Any = None) -> Value:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NoRule("clone to another memory format")
    if op.target is aten.contiguous.default:
        if x.strides is None or x.strides == contiguous_strides(x.shape):
            return _alias(sim, x)
        y = sim.new(op.shape, x.itemsize)
    else:
        y = sim.new(op.shape, x.itemsize, None if memory_format is torch.contiguous_format else elementwise_strides(x))
    sim.record([x], y, [], _pass)
    return y


@rule(aten.to.dtype, aten.type_as.default, aten.to.dtype_layout)
def to_dtype(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if itemsize(op) == x.itemsize and x.requires_grad:
        return _alias(sim, x)
    if x.requires_grad:
        raise NoRule("conversion between number formats in the trained part")
    return sim.new(op.shape, itemsize(op))


@rule(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
def detach(sim: Simulation, op: Any, x: Value) -> Value:
    return sim.view(x, x.shape, x.strides) if op.target is aten.detach.default else _alias(sim, x)


def _alias(sim: Simulation, x: Value) -> Value:
    """The same tensor under another name."""
    y = sim.view(x, x.shape, x.strides)
    y.requires_grad, y.node, y.port, y.parameter = x.requires_grad, x.node, x.port, x.parameter
    return y


@rule(aten.dropout.default, aten.dropout_.default)
def dropout(sim: Simulation, op: Any, x: Value, p: float, train: bool) -> Value:
    # On a CPU: noise of the input's size and type, and a multiplication
    if p == 0 or not train:
        return _alias(sim, x)
    noise = sim.allocate(x.bytes)
    if op.target is aten.dropout_.default:
        return _overwrite(sim, x, [x], [], unary_fresh(x), [noise])
    y = sim.new(op.shape, x.itemsize, elementwise_strides(x))
    sim.record([x], y, [], unary_fresh(x), [noise])
    return y


# elementwise, two inputs


def _result(sim: Simulation, op: Any, *inputs: Any) -> Value:
    return sim.new(op.shape, itemsize(op), elementwise_strides(*[v for v in inputs if isinstance(v, Value)]))


@rule(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.add_.Tensor, aten.sub_.Tensor)
def add(sim: Simulation, op: Any, a: Any, b: Any, alpha: float = 1) -> Value:
    scaled = alpha != 1 or op.target in (aten.sub.Tensor, aten.sub_.Tensor)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        first = share(sim, gradient) if first_needs else None
        if not second_needs:
            return [first, None]
        second = sim.new(gradient.shape, gradient.itemsize, gradient.strides) if scaled else share(sim, gradient)
        return [first, second]

    inputs = [v if isinstance(v, Value) else None for v in (a, b)]
    first_needs, second_needs = (v is not None and v.requires_grad for v in inputs)
    if op.target in (aten.add_.Tensor, aten.sub_.Tensor):
        return _overwrite(sim, a, inputs, [], backward, [])
    y = _result(sim, op, a, b)
    sim.record(inputs, y, [], backward)
    return y


def _products(
    sim: Simulation, op: Any, a: Any, b: Any, temporaries: int = 0
) -> tuple[list[Value | None], list[Value], Backward]:
    inputs = [v if isinstance(v, Value) else None for v in (a, b)]
    needs = [v is not None and v.requires_grad for v in inputs]
    saved = [other for other, need in zip(reversed(inputs), needs, strict=True) if need and other is not None]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        # each product has the size of the result; broadcast ones are summed up afterwards
        results: Gradients = []
        for need in needs:
            if need and results and temporaries:
                sim.passing((temporaries + 1) * gradient.bytes)
            results.append(sim.new(op.shape, itemsize(op), gradient.strides) if need else None)
        return results

    return inputs, saved, backward


@rule(aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor)
def mul(sim: Simulation, op: Any, a: Any, b: Any) -> Value:
    inputs, saved, backward = _products(sim, op, a, b)
    if op.target is aten.mul_.Tensor:
        if inputs[1] is not None and inputs[1].requires_grad:
            extra = [sim.allocate(a.bytes)]  # what was there before is the other factor's derivative
            return _overwrite(sim, a, inputs, [v for v in saved if v is not a], backward, extra)
        return _overwrite(sim, a, inputs, saved, backward, [])
    y = _result(sim, op, a, b)
    sim.record(inputs, y, saved, backward)
    return y


@rule(aten.div.Tensor, aten.div.Scalar)
def div(sim: Simulation, op: Any, a: Any, b: Any) -> Value:
    inputs, saved, backward = _products(sim, op, a, b, temporaries=1)
    if inputs[1] is not None and inputs[1].requires_grad:
        saved = [v for v in inputs if v is not None]  # -grad * (self / other) / other
    y = _result(sim, op, a, b)
    sim.record(inputs, y, saved, backward)
    return y


@rule(aten.pow.Tensor_Scalar)
def pow_(sim: Simulation, op: Any, x: Value, exponent: float) -> Value:
    y = _result(sim, op, x)
    sim.record([x], y, [x], fresh(x, temporary=x.bytes))
    return y


@rule(aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default)
def from_result(sim: Simulation, op: Any, x: Value) -> Value:
    y = _result(sim, op, x)
    sim.record([x], y, [y], fresh(x, temporary=x.bytes))
    return y


@rule(aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar)
@rule(aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ne.Tensor)
@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default)
@rule(aten.full.default, aten.zeros_like.default, aten.ones_like.default, aten.logical_not.default)
@rule(aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.logical_and.default, aten.rand.default, aten.rand_like.default)
def constant(sim: Simulation, op: Any, *_: Any, **__: Any) -> Value:
    return sim.new(op.shape, itemsize(op))


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
    if any(p >= s for p, s in zip(_pair(output_padding), _pair(stride), strict=True)):
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
            results[1] = sim.new(weight.shape, weight.itemsize, weight.strides)
            if columns:
                sim.passing(columns)
        if bias is not None and needs[2]:
            results[2] = sim.new(bias.shape, bias.itemsize)
        return results

    needs = [v is not None and v.requires_grad for v in (x, weight, bias)]
    sim.record([x, weight, bias], y, [x, weight], backward)
    return y


def _by_onednn(x: Value, weight: Value, stride: Any, dilation: Any, groups: int) -> bool:
    """torch's own choice of kernel for float convolutions on one thread (ConvParams::use_mkldnn)."""
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
            results[0] = sim.new(x.shape, x.itemsize)
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
    sim.record([a, b], y, [v for v, other in ((b, a), (a, b)) if other.requires_grad], fresh(_plain(a), _plain(b)))
    return y


@rule(aten.addmm.default)
def addmm(sim: Simulation, op: Any, bias: Value, a: Value, b: Value) -> Value:
    y = sim.new(op.shape, a.itemsize)
    saved = [v for v, other in ((b, a), (a, b)) if other.requires_grad]
    sim.record([bias, a, b], y, saved, fresh(bias, _plain(a), _plain(b)))
    return y


@rule(aten.matmul.default)
def matmul(sim: Simulation, op: Any, a: Value, b: Value) -> Value:
    if len(a.shape) < 3 or len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2]:
        if len(a.shape) == 2 and len(b.shape) == 2:
            return bmm(sim, op, a, b)  # type: ignore[no-any-return]
        raise NoRule("matmul with broadcasting")
    stacks = [sim.reshape(v, (prod(v.shape[:-2]), *v.shape[-2:])) for v in (a, b)]
    y = sim.new(op.shape, a.itemsize)
    needs = [v.requires_grad for v in (a, b)]
    saved = [stack for stack, need in zip(reversed(stacks), needs, strict=True) if need]
    sim.record([a, b], y, saved, fresh(_plain(a), _plain(b)))
    for stack in stacks:
        sim.drop(stack)
    return y


def _plain(x: Value) -> Value:
    """The gradient of a matrix product is contiguous whatever the factor was."""
    y = Value(x.storage, x.shape, x.itemsize)
    y.requires_grad = x.requires_grad
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
    if len(query.shape) != 4 or dropout_p or enable_gqa or not same or (attn_mask is not None and attn_mask.requires_grad):
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
    sim.record([x, weight, bias], y, saved, _norm_backward(x, weight, bias, x.bytes if x.requires_grad else 0), statistics)
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
        return mean(sim, op, x)  # type: ignore[no-any-return]
    return avg_pool(sim, op, x)  # type: ignore[no-any-return]


@rule(aten.mean.dim, aten.mean.default)
def mean(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], fresh(_plain(x)))
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
    sim.record([x], y, [y], fresh(_plain(x)))
    return y


# views


def _record_view(sim: Simulation, x: Value, y: Value, backward: Backward) -> Value:
    if sim.record([x], y, [], backward):
        sim.viewed.add(x.storage)
    return y


@rule(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default)
@rule(aten.unflatten.int, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.squeeze.dims)
def reshape(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.reshape(x, op.shape)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.reshape(gradient, x.shape)]

    if y.storage != x.storage:
        sim.record([x], y, [], backward)
        return y
    return _record_view(sim, x, y, backward)


@rule(aten.permute.default)
def permute(sim: Simulation, op: Any, x: Value, dims: Sequence[int]) -> Value:
    return _permuted(sim, x, [dim % len(x.shape) for dim in dims])


@rule(aten.transpose.int)
def transpose(sim: Simulation, op: Any, x: Value, first: int, second: int) -> Value:
    dims = list(range(len(x.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(sim, x, dims)


@rule(aten.t.default)
def t(sim: Simulation, op: Any, x: Value) -> Value:
    return _permuted(sim, x, list(reversed(range(len(x.shape)))))


def _permuted(sim: Simulation, x: Value, dims: list[int]) -> Value:
    inverse = sorted(range(len(dims)), key=dims.__getitem__)

    def turned(value: Value, order: list[int]) -> Value:
        shape = tuple(value.shape[dim] for dim in order)
        old = value.strides or contiguous_strides(value.shape)
        strides: Strides = tuple(old[dim] for dim in order)
        return sim.view(value, shape, None if strides == contiguous_strides(shape) else strides)

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [turned(gradient, inverse)]

    return _record_view(sim, x, turned(x, dims), backward)


@rule(aten.expand.default, aten.expand_as.default)
def expand(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if op.shape == x.shape:
        return _record_view(sim, x, sim.view(x, x.shape, x.strides), _pass)
    missing = len(op.shape) - len(x.shape)
    old = (0,) * missing + (x.strides or contiguous_strides(x.shape))
    sizes = (1,) * missing + x.shape
    strides = tuple(0 if size != new else step for size, new, step in zip(sizes, op.shape, old, strict=True))
    return _record_view(sim, x, sim.view(x, op.shape, strides), _pass)  # the engine sums it up to x's size


@rule(aten.slice.Tensor, aten.select.int, aten.narrow.default)
def part(sim: Simulation, op: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    old = x.strides or contiguous_strides(x.shape)
    dim %= len(x.shape)
    if op.target is aten.select.int:
        strides = old[:dim] + old[dim + 1 :]
    else:
        if op.target is aten.slice.Tensor and op.shape == x.shape and step == 1:
            strides = old
        strides = (*old[:dim], old[dim] * (step if op.target is aten.slice.Tensor else 1), *old[dim + 1 :])
    y = sim.view(x, op.shape, None if strides == contiguous_strides(op.shape) else strides)
    return _record_view(sim, x, y, fresh(_plain(x)))  # zeros of full size, with the part filled in


@rule(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.split.sizes)
def split(sim: Simulation, op: Any, x: Value, *arguments: Any, dim: int | None = None) -> list[Value]:
    unbind = op.target is aten.unbind.int
    if dim is None:
        position = 0 if unbind else 1
        dim = arguments[position] if len(arguments) > position else 0
    assert dim is not None
    dim %= len(x.shape)
    old = x.strides or contiguous_strides(x.shape)
    strides = old[:dim] + old[dim + 1 :] if unbind else old
    outputs = [sim.view(x, shape, strides) for shape in op.shape]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        zeros = [sim.new(shape, x.itemsize) for shape, g in zip(op.shape, gradients, strict=True) if g is None]
        result = sim.new(x.shape, x.itemsize)
        for zero in zeros:
            sim.drop(zero)
        return [result]

    if sim.record([x], outputs, [], backward):
        sim.viewed.add(x.storage)
    return outputs


@rule(operator.getitem)
def getitem(sim: Simulation, op: Any, values: Sequence[Value], index: int) -> Value:
    return _alias(sim, values[index])


# joins and rearrangements that copy


@rule(aten.cat.default, aten.concat.default)
def cat(sim: Simulation, op: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(op.shape)
    y = sim.new(op.shape, itemsize(op), channels_last_strides(op.shape) if _all_channels_last(tensors) else None)
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


def _all_channels_last(tensors: Sequence[Value]) -> bool:
    return all(is_channels_last(v.shape, v.strides) for v in tensors)


@rule(aten.stack.default)
def stack(sim: Simulation, op: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    y = sim.new(op.shape, itemsize(op))
    needs = [v.requires_grad for v in tensors]
    shapes = [v.shape for v in tensors]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        old = gradient.strides or contiguous_strides(gradient.shape)
        strides = old[: dim % len(old)] + old[dim % len(old) + 1 :]
        return [sim.view(gradient, s, strides) if need else None for s, need in zip(shapes, needs, strict=True)]

    sim.record(list(tensors), y, [], backward)
    return y


@rule(aten.index_select.default)
def index_select(sim: Simulation, op: Any, x: Value, dim: int, index: Any) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [index] if isinstance(index, Value) else [], fresh(_plain(x)))
    return y


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(sim: Simulation, op: Any, x: Value, padding: Sequence[int], mode: str = "constant", *_: Any, **__: Any) -> Value:
    if op.target is aten.pad.default and mode != "constant":
        raise NoRule("padding that is not constant")
    y = sim.new(op.shape, x.itemsize, elementwise_strides(x) if op.shape == x.shape else None)
    sim.record([x], y, [], fresh(_plain(x)))
    return y


@rule(aten.repeat.default, aten.flip.default, aten.roll.default, aten.pixel_shuffle.default)
@rule(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec)
def rearranged(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if op.target is aten.repeat.default and x.requires_grad:
        raise NoRule("repeat in the trained part")
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], fresh(_plain(x)))
    return y


def itemsize(op: Any) -> int:
    return op.dtype.itemsize if op.dtype is not None else 4
