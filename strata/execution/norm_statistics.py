"""Which batch norms of a step use fixed statistics (Execution.norm_statistics), and the step's operations with them.

A batch norm with fixed statistics is a scale and a shift per channel: samples do not meet in it, so a batch in parts
gives the gradients of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from strata.graph import Ref, SizedOp
from strata.graph.batch_norms import MEAN, TRAINING
from strata.ops.channels import name_of

if TYPE_CHECKING:
    from strata.execution.execution import Execution
    from strata.graph import ChannelGraph, Cut


def fixed_norms(graph: ChannelGraph, cut: Cut, execution: Execution) -> frozenset[str]:
    """The norms by their running means (ChannelGraph.batch_norms)."""
    kind = execution.norm_statistics
    if kind == "batch":
        return frozenset()
    norms = [norm for norm in graph.batch_norms if norm.mean in cut.shapes]
    return frozenset(norm.mean for norm in norms if kind == "fixed" or cut.frozen.issuperset(norm.parameters))


def with_fixed(ops: Sequence[SizedOp], fixed: frozenset[str]) -> Sequence[SizedOp]:
    """The sized operations of a cut with these norms fixed."""
    if not fixed:
        return ops
    means = {op.name for op in ops if op.state_name in fixed}
    return [_fixed(op) if _mean_of(op) in means else op for op in ops]


def _mean_of(op: SizedOp) -> str | None:
    if op.kind != "op" or name_of(op.target) != "batch_norm" or not isinstance(op.args[MEAN], Ref):
        return None
    return op.args[MEAN].name


def _fixed(op: SizedOp) -> SizedOp:
    return replace(op, args=(*op.args[:TRAINING], False, *op.args[TRAINING + 1 :]))
