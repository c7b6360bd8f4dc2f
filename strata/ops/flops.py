"""What FLOP rules are written in: two per multiply-add, for the whole batch that the shapes have.

`flops=` of an `Operator` gets the SizedOp and its positional arguments, tensors as SizedOps, and gives a `Count`.
Only products of matrices, convolutions and attention are counted; norms and activations are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from strata.core.errors import one_line
from strata.ops.channels import RuleFailed
from strata.ops.operator import operator_of
from strata.ops.sized import SizedOp


class Count(NamedTuple):
    """As torch's FlopCounterMode counts on a CPU, and what that gets wrong (see execution/compute.py)."""

    forward: int = 0
    train: int = 0  # forward and backward
    attention_forward: int = 0  # of the fused kernel, which FlopCounterMode does not see
    attention_train: int = 0
    grouped_excess: int = 0  # what it counts too much for the weight of a grouped convolution


Rule = Callable[..., Count]


def counted(op: SizedOp, arguments: Sequence[Any]) -> Count | None:
    """By the operator's rule; None if there is none."""
    rule = operator_of(op.target).flops
    if rule is None:
        return None
    try:
        return rule(op, *arguments)
    except Exception as error:
        raise RuleFailed(f"the FLOP rule of {op.target} failed: {one_line(error, kind=True)}") from error


def product(forward: int, *factors: Any) -> Count:
    """Of a product: as much again for the gradient of each factor that needs one."""
    needs = sum(1 for factor in factors if isinstance(factor, SizedOp) and factor.requires_grad)
    return Count(forward, forward * (1 + needs))


def nothing(op: SizedOp, *_: Any) -> Count:
    """An operator without products."""
    return Count()
