"""What byte rules are written in: what an operator allocates, saves and hands back, on a CPU in eager mode.

`bytes=` of an `Operator` gets the simulation (tape.py), the SizedOp and the operator's arguments with tensors as
`Value`s; it returns the result. Results hold a reference of their own; what a rule makes and does not return or save it
must drop. The saved tensors are those of torch's derivatives.yaml. Temporaries of library calls (oneDNN, BLAS) are not
counted, see execution/measured.py.

A rule pays for operators that a plan meets thousands of times, for those that work in place, and for those whose sizes
depend on the batch; all others are learned (execution/learned.py), which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strata.core.errors import one_line
from strata.ops.channels import RuleFailed
from strata.ops.operator import operator_of
from strata.ops.sized import SizedOp, itemsize
from strata.ops.tape import Backward, Gradients, Simulation, Value, elementwise_strides

__all__ = [
    "NoRule",
    "Rule",
    "alias",
    "fresh",
    "itemsize",
    "made",
    "overwrite",
    "pass_on",
    "plain",
    "share",
    "simulate",
    "unary_fresh",
]
Rule = Callable[..., Any]


class NoRule(Exception):
    """No byte rule covers this operator, or this use of it: learn or trace it instead."""


def simulate(sim: Simulation, op: SizedOp, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Apply the operator's rule; NoRule if there is none that covers this use."""
    rule = operator_of(op.target).byte_rule(op.target)
    if rule is None:
        raise NoRule(str(op.target))
    try:
        return rule(sim, op, *arguments, **keywords)
    except NoRule:
        raise
    except Exception as error:
        raise RuleFailed(f"the byte rule of {op.target} failed: {one_line(error, kind=True)}") from error


# what forward does


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


def made(sim: Simulation, op: SizedOp, *_: Any, **__: Any) -> Value:
    """A new tensor that no gradient goes through."""
    return sim.new(op.shape, itemsize(op))


def overwrite(
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


def unary_fresh(x: Value) -> Backward:
    """Elementwise backward: one new tensor, laid out as its operands are."""

    def backward(sim: Simulation, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        assert gradient is not None
        return [sim.new(x.shape, x.itemsize, elementwise_strides(x, gradient))]

    return backward


def pass_on(sim: Simulation, gradients: Gradients) -> Gradients:
    return [share(sim, gradients[0])]
