"""`paper` accounting, to compare with the paper's numbers: what it counts, not what a step needs (that is `peak`).

bytes = 4 * [batch * (outputs of all leaf modules whose output requires a gradient) + parameters + gradients of trained
parameters]. The authors' networks keep no running statistics, so their state dict is the parameters; buffers are left
out here too. Every leaf module counts (Flatten, Add, an identity shortcut), even where it returns what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.graph import Cut, SizedOp

FLOAT = 4


def activation_bytes(ops: Sequence[SizedOp]) -> int:
    """Over the SizedOps of one batch.

    An identity shortcut passes on only what the addition will take: where that is cut, the authors cut in the
    shortcut, so it counts at the cut width (golden.yaml's s_exact rows hold only so).
    """
    cut = {op.inputs[0]: op for op in ops if op.kind == "cut"}
    counted = (op for op in ops if op.leaf_outputs and op.requires_grad)
    return FLOAT * sum(_elements(op) + (op.leaf_outputs - 1) * _elements(cut.get(op.name, op)) for op in counted)


def weight_bytes(cut: Cut) -> int:
    return FLOAT * sum(prod(cut.shapes[name]) for name in cut.parameters)


def gradient_bytes(cut: Cut) -> int:
    return FLOAT * sum(prod(cut.shapes[name]) for name in cut.trained)


def _elements(op: SizedOp) -> int:
    shapes = op.shape if isinstance(op.shape, list) else [op.shape]
    return sum(prod(shape) for shape in shapes)
