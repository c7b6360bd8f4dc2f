"""The table of rules, and what many of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strata.ops.tape import Backward, Gradients, Simulation, Value, elementwise_strides

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


def itemsize(op: Any) -> int:
    return op.dtype.itemsize if op.dtype is not None else 4


def alias(sim: Simulation, x: Value) -> Value:
    """The same tensor under another name."""
    y = sim.view(x, x.shape, x.strides)
    y.requires_grad, y.node, y.port, y.parameter = x.requires_grad, x.node, x.port, x.parameter
    return y


def plain(x: Value) -> Value:
    """The gradient of a matrix product is contiguous whatever the factor was."""
    y = Value(x.storage, x.shape, x.itemsize)
    y.requires_grad = x.requires_grad
    return y


# what backward does: small constructors


def fresh(*inputs: Value | None, whole: bool = True) -> Backward:
    """A new gradient for each input that requires one, all alive at once; not `whole`: seen through a view."""
    wanted = [(v.shape, v.itemsize, v.strides) if v is not None and v.requires_grad else None for v in inputs]

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        results = [None if w is None else sim.new(*w) for w in wanted]
        for result in results:
            if result is not None:
                result.whole = whole
        return results

    return backward


def share(sim: Simulation, gradient: Value | None) -> Value | None:
    if gradient is not None:
        gradient.uses += 1
    return gradient


def unary_fresh(x: Value, temporaries: float = 0) -> Backward:
    """Elementwise backward: one new tensor, laid out as its operands are."""

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        result = sim.new(x.shape, x.itemsize, elementwise_strides(x, gradient))
        if temporaries:
            sim.passing(int(x.bytes * temporaries))
        return [result]

    return backward


def pass_on(sim: Simulation, gradients: Gradients) -> Gradients:
    return [share(sim, gradients[0])]
