"""Activations, arithmetic with broadcasting, dropout, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from strata.ops.bytes.base import (
    RULES,
    NoRule,
    Rule,
    alias,
    aten,
    itemsize,
    pass_on,
    rule,
    share,
    unary_fresh,
)
from strata.ops.tape import (
    Backward,
    Gradients,
    Simulation,
    Value,
    contiguous_strides,
    elementwise_strides,
)

# elementwise, one input


def _unary(saves: str, temporaries: float) -> Rule:
    def forward(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
        y = sim.new(op.shape, itemsize(op), elementwise_strides(x))
        if op.dtype.is_floating_point:
            sim.record([x], y, {"self": [x], "result": [y], "": []}[saves], unary_fresh(x, temporaries))
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


# What is saved, and how many temporaries of the input's size the backward formula makes beside its result (C++ keeps
# them to the end of the expression); booleans are a quarter.
_UNARY: dict[str, dict[str, float]] = {
    "self": {
        "hardtanh": 0, "relu6": 0, "silu": 0, "gelu": 0, "hardswish": 0, "hardsigmoid": 0, "mish": 0, "softplus": 0,
        "leaky_relu": 0, "elu": 0, "selu": 0, "celu": 0, "log": 0, "abs": 1, "clamp": 0.5, "clamp_min": 0.25,
    },
    "result": {"relu": 0, "sigmoid": 0, "tanh": 0, "exp": 0, "sqrt": 1, "rsqrt": 2, "reciprocal": 2},
    "": {"neg": 0},
}  # fmt: skip
_IN_PLACE = {
    "self": ("hardtanh", "relu6", "silu", "hardswish", "hardsigmoid", "mish"),
    "result": ("relu", "sigmoid", "tanh", "leaky_relu", "elu"),
}
for _saves, _names in _UNARY.items():
    for _name, _temporaries in _names.items():
        RULES[getattr(aten, _name).default] = _unary(_saves, _temporaries)
for _saves, _in_place in _IN_PLACE.items():
    for _name in _in_place:
        RULES[getattr(aten, _name + "_").default] = _unary_in_place(_saves)
RULES[aten.pow.Tensor_Scalar] = _unary("self", 2)


@rule(aten.clone.default, aten.contiguous.default)
def clone(sim: Simulation, op: Any, x: Value, memory_format: Any = None) -> Value:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NoRule("clone to another memory format")
    if op.target is aten.contiguous.default:
        if x.strides is None or x.strides == contiguous_strides(x.shape):
            return alias(sim, x)
        y = sim.new(op.shape, x.itemsize)
    else:
        y = sim.new(op.shape, x.itemsize, None if memory_format is torch.contiguous_format else elementwise_strides(x))
    sim.record([x], y, [], pass_on)
    return y


@rule(aten.to.dtype, aten.type_as.default, aten.to.dtype_layout)
def to_dtype(sim: Simulation, op: Any, x: Value, *_: Any, **__: Any) -> Value:
    if itemsize(op) == x.itemsize:
        return alias(sim, x)
    if x.requires_grad:
        raise NoRule("conversion between number formats in the trained part")
    return sim.new(op.shape, itemsize(op))


@rule(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
def detach(sim: Simulation, op: Any, x: Value) -> Value:
    return sim.view(x, x.shape, x.strides) if op.target is aten.detach.default else alias(sim, x)


@rule(aten.dropout.default, aten.dropout_.default)
def dropout(sim: Simulation, op: Any, x: Value, p: float, train: bool) -> Value:
    # On a CPU: noise of the input's size and type, and a multiplication
    if p == 0 or not train:
        return alias(sim, x)
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
    inputs, saved, backward = _products(sim, op, a, b, temporaries=2)
    if inputs[1] is not None and inputs[1].requires_grad:
        saved = [v for v in inputs if v is not None]  # -grad * (self / other) / other
    y = _result(sim, op, a, b)
    sim.record(inputs, y, saved, backward)
    return y


@rule(aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar)
@rule(aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ne.Tensor)
@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default)
@rule(aten.full.default, aten.zeros_like.default, aten.ones_like.default, aten.logical_not.default)
@rule(
    aten.bitwise_not.default,
    aten.bitwise_and.Tensor,
    aten.logical_and.default,
    aten.rand.default,
    aten.rand_like.default,
)
def constant(sim: Simulation, op: Any, *_: Any, **__: Any) -> Value:
    return sim.new(op.shape, itemsize(op))
