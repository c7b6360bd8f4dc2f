"""Element by element: activations, arithmetic with broadcasting, dropout, comparisons, conversions.

Every name stands for its in-place form too (relu and relu_). Those need byte rules, because they cannot be learned.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from strata.ops.bytes import NoRule, Rule, alias, overwrite, pass_on, share, unary_fresh
from strata.ops.channels import elementwise, like_first, name_of
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register
from strata.ops.sized import SizedOp, itemsize
from strata.ops.tape import Backward, Gradients, Simulation, Value, contiguous_strides, elementwise_strides

# --- one input ---------------------------------------------------------------------------------------------------


def saves_input(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, itemsize(op), elementwise_strides(x))
    sim.record([x], y, [x], unary_fresh(x))
    return y


def saves_result(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    y = sim.new(op.shape, itemsize(op), elementwise_strides(x))
    sim.record([x], y, [y], unary_fresh(x))
    return y


def saves_input_in_place(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    # the operator overwrites what its backward needs: autograd keeps a clone
    extra = [sim.allocate(x.bytes)] if x.requires_grad else []
    return overwrite(sim, x, [x], [], unary_fresh(x), extra)


def saves_result_in_place(sim: Simulation, op: SizedOp, x: Value, *_: Any, **__: Any) -> Value:
    return overwrite(sim, x, [x], [x], unary_fresh(x), [])


def clone_bytes(sim: Simulation, op: SizedOp, x: Value, memory_format: Any = None) -> Value:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NoRule("clone to another memory format")
    plain = memory_format is torch.contiguous_format
    y = sim.new(op.shape, x.itemsize, None if plain else elementwise_strides(x))
    sim.record([x], y, [], pass_on)
    return y


def contiguous_bytes(sim: Simulation, op: SizedOp, x: Value, memory_format: Any = None) -> Value:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NoRule("another memory format")
    if x.strides is None or x.strides == contiguous_strides(x.shape):
        return alias(sim, x)
    y = sim.new(op.shape, x.itemsize)
    sim.record([x], y, [], pass_on)
    return y


def detach_bytes(sim: Simulation, op: SizedOp, x: Value) -> Value:
    return sim.view(x, x.shape, x.strides)


def dropout_bytes(sim: Simulation, op: SizedOp, x: Value, p: float, train: bool) -> Value:
    # On a CPU: noise of the input's size and type, and a multiplication
    if p == 0 or not train:
        return alias(sim, x)
    noise = sim.allocate(x.bytes)
    if op.target._schema.is_mutable:
        return overwrite(sim, x, [x], [], unary_fresh(x), [noise])
    y = sim.new(op.shape, x.itemsize, elementwise_strides(x))
    sim.record([x], y, [], unary_fresh(x), [noise])
    return y


# --- two inputs --------------------------------------------------------------------------------------------------


def add_bytes(sim: Simulation, op: SizedOp, a: Any, b: Any, alpha: float = 1) -> Value:
    scaled = alpha != 1 or name_of(op.target).startswith("sub")

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
    if op.target._schema.is_mutable:
        return overwrite(sim, a, inputs, [], backward, [])
    y = _result(sim, op, a, b)
    sim.record(inputs, y, [], backward)
    return y


def mul_bytes(sim: Simulation, op: SizedOp, a: Any, b: Any) -> Value:
    inputs, saved, backward = _products(sim, op, a, b)
    if op.target._schema.is_mutable:
        if inputs[1] is not None and inputs[1].requires_grad:
            extra = [sim.allocate(a.bytes)]  # what was there before is the other factor's derivative
            return overwrite(sim, a, inputs, [v for v in saved if v is not a], backward, extra)
        return overwrite(sim, a, inputs, saved, backward, [])
    y = _result(sim, op, a, b)
    sim.record(inputs, y, saved, backward)
    return y


def div_bytes(sim: Simulation, op: SizedOp, a: Any, b: Any) -> Value:
    inputs, saved, backward = _products(sim, op, a, b, temporaries=2)
    if inputs[1] is not None and inputs[1].requires_grad:
        saved = [v for v in inputs if v is not None]  # -grad * (self / other) / other
    y = _result(sim, op, a, b)
    sim.record(inputs, y, saved, backward)
    return y


def _result(sim: Simulation, op: SizedOp, *inputs: Any) -> Value:
    y = sim.new(op.shape, itemsize(op), elementwise_strides(*[v for v in inputs if isinstance(v, Value)]))
    sim.passing(sum(_converted(v, y) for v in inputs if isinstance(v, Value)))
    return y


def _converted(operand: Value, result: Value) -> int:
    """Bytes of a copy of the operand in the result's type, which the kernel needs of a mask, for example."""
    return 0 if operand.itemsize == result.itemsize else prod(operand.shape) * result.itemsize


def _products(
    sim: Simulation, op: SizedOp, a: Any, b: Any, temporaries: int = 0
) -> tuple[list[Value | None], list[Value], Backward]:
    inputs = [v if isinstance(v, Value) else None for v in (a, b)]
    needs = [v is not None and v.requires_grad for v in inputs]
    saved = [other for other, need in zip(reversed(inputs), needs, strict=True) if need and other is not None]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        # each product has the size of the result; broadcast ones are summed up afterwards
        results: Gradients = []
        for need, other in zip(needs, reversed(inputs), strict=True):
            if need and results and temporaries:
                sim.passing((temporaries + 1) * gradient.bytes)
            results.append(sim.new(op.shape, itemsize(op), gradient.strides) if need else None)
            if need and other is not None:
                sim.passing(_converted(other, gradient))
        return results

    return inputs, saved, backward


# --- the records -------------------------------------------------------------------------------------------------

_ELEMENTWISE = Operator(("",), channels=elementwise, flops=nothing, samples_apart=SamplesApart.ALWAYS)
_PLAIN = replace(_ELEMENTWISE, vectorised="elementwise")  # and the same whatever devices stand side by side


def _register(
    record: Operator, names: str, bytes: Rule | None = None, in_place: Rule | None = None, overloads: str = ""
) -> None:
    """The names and their in-place forms; `overloads` are those that both byte rules cover."""
    for name in names.split():
        covered = tuple(overloads.split())
        register(replace(record, names=(name,), bytes=bytes, bytes_for=covered if bytes else ()))
        if hasattr(torch.ops.aten, f"{name}_"):
            register(replace(record, names=(f"{name}_",), bytes=in_place, bytes_for=covered if in_place else ()))


# What torch's derivatives.yaml saves. With byte rules: what networks are mostly made of, and what works in place.
_register(_PLAIN, "relu sigmoid tanh", saves_result, saves_result_in_place)
_register(_PLAIN, "relu6 hardtanh silu hardswish", saves_input, saves_input_in_place)
_register(_PLAIN, "gelu", saves_input)
_register(_PLAIN, "leaky_relu", saves_input, saves_result_in_place)
_register(_PLAIN, "elu", None, saves_result_in_place)
_register(_PLAIN, "hardsigmoid mish", None, saves_input_in_place)
_register(_PLAIN, "add sub", add_bytes, add_bytes, "Tensor Scalar")
_register(_PLAIN, "mul", mul_bytes, mul_bytes, "Tensor Scalar")
_register(_PLAIN, "div", div_bytes, None, "Tensor Scalar")
_register(_PLAIN, "clone", clone_bytes)
_register(_PLAIN, "contiguous", contiguous_bytes)
_register(_PLAIN, "selu celu softplus neg abs exp sqrt square")
_register(replace(_ELEMENTWISE, vectorised="dropout"), "dropout", dropout_bytes, dropout_bytes)
_register(
    _ELEMENTWISE,
    """
    log_sigmoid threshold hardshrink softshrink rsub pow expm1 log log1p log2 rsqrt reciprocal sin cos erf
    clamp clamp_min clamp_max maximum minimum where lerp addcmul addcdiv fmod remainder trunc floor_divide
    feature_dropout alpha_dropout native_dropout alias _to_copy lift_fresh_copy
    masked_fill nan_to_num eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite bitwise_not
    """,
)
_register(replace(_ELEMENTWISE, channels=like_first), "to type_as")  # x.to(y): of y only the type
register(replace(_ELEMENTWISE, names=("detach",), bytes=detach_bytes, differentiable=False))
for _name in ("detach_", "bernoulli", "bernoulli_", "sign", "floor", "ceil", "round"):
    register(replace(_ELEMENTWISE, names=(_name,), differentiable=False))
for _name in ("sign_", "floor_", "ceil_", "round_"):
    register(replace(_ELEMENTWISE, names=(_name,)))
