"""Rows of a table, looked up by number."""

from __future__ import annotations

from torch import Tensor

from strata.ops.channels import FxNode, Walk
from strata.ops.flops import nothing
from strata.ops.operator import Operator, register


def channels(p: Walk, node: FxNode) -> Tensor:
    weight, index = node.args[0], node.args[1]
    p.pin(index)
    return p.label(node, len(p.shape_of(index)), p.source(node, weight, 1))


register(Operator(("embedding",), channels=channels, flops=nothing))
