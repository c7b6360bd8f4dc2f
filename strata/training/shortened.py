"""How a lean device is simulated: by a shorter way to the same numbers, up to float32 rounding.

A real device computes activations anew, lets gradients go and takes a batch in parts, to keep less. This machine has
room, so a run (not --exact, not a fleet's device) leaves that out. Only batch norms see the parts of a batch: the whole
batch goes through the network at once, and each group of `micro_batch` samples is normalised by its own statistics.
What a device reports, bytes and FLOPs, is still that of the lean step (memory.py, federation/rounds.py).

Which way is taken is a pure function of cut and settings: never of timing, engine or number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from strata.execution import memory
from strata.execution.chunks import may_be_chunked
from strata.execution.norm_statistics import fixed_norms
from strata.execution.placement import draws
from strata.execution.segments import writes
from strata.graph.batch_norms import MEAN, TRAINING, VARIANCE, is_batch_norm, with_fixed_statistics
from strata.graph.submodel import compiled

if TYPE_CHECKING:
    from strata.execution.measured import Forward
    from strata.graph import ChannelGraph, Cut
    from strata.methods.base import Phase
    from strata.training.settings import LocalTraining
    from strata.training.workspace import Workspace

ROOM = 2**30  # bytes: whoever simulates steps that take more may need the levers just as a device does


def shortened(workspace: Workspace, phase: Phase, settings: LocalTraining) -> tuple[LocalTraining, int | None]:
    """How the phase is simulated: settings, and how many samples batch norms take together (None: all that come)."""
    if not (settings.shortened and settings.is_lean):
        return settings, None
    plain = replace(
        settings,
        activation_checkpointing=None,
        frozen_chunk=None,
        release_gradients=False,
        frozen_weights="memory",
    )
    cuts = (phase.cut, *phase.levels)
    group = None
    # a loss of the user's own need not be a mean over samples
    if settings.in_parts and settings.by_objective and all(workspace.parts_may_join(cut) for cut in cuts):
        if not settings.caches:
            plain, group = replace(plain, micro_batch=None), settings.micro_batch
        elif all(len(fixed_norms(workspace.graph, cut, settings)) == _norms(workspace.graph, cut) for cut in cuts):
            # what the frozen part puts out is read by itself, which groups cannot be
            plain = replace(plain, micro_batch=None)
    if any(_bytes(workspace, cut, plain) > ROOM for cut in cuts):
        return settings, None
    return plain, group


def parts_may_join(graph: ChannelGraph, cut: Cut) -> bool:
    """Whether parts of a batch can go through the cut's network together: samples meet in nothing but batch norms,
    nothing draws random numbers (each part draws its own), and nobody reads what a part leaves behind."""
    mode = graph.mode("train")
    batch = str(mode.inputs[0].meta["val"].shape[0])
    drawing = {op.name for op in graph.sized(cut, 2) if op.kind == "op" and draws(op)}
    needed = mode.needed(graph.output_named(cut.output))
    return all(
        node.name not in drawing and _leaves_nothing(node) and (_counts(node) or may_be_chunked(node, batch))
        for node in mode.graph.nodes
        if node.op == "call_function" and (node in needed or writes(node.target))
    )


def forward_in_groups(module: nn.Module, fixed: frozenset[str], size: int) -> Forward:
    """As placement.forward_of, the whole submodel; batch norms, but for fixed ones, take so many samples together."""
    graph = with_fixed_statistics(module.train_graph, fixed)  # type: ignore[arg-type]
    for node in graph.nodes:
        if is_batch_norm(node) and node.args[TRAINING]:
            node.target, node.args = norm_in_groups, (size, *node.args)
    return compiled(graph, "train")


def norm_in_groups(size: int, x: Tensor, *rest: Any) -> Tensor:
    """aten.batch_norm of `size` samples after the other: running statistics move with each, as in parts of a batch."""
    if len(x) <= size:
        return torch.ops.aten.batch_norm.default(x, *rest)
    return torch.cat([torch.ops.aten.batch_norm.default(part, *rest) for part in x.split(size)])


def _bytes(workspace: Workspace, cut: Cut, settings: LocalTraining) -> int:
    kind = ("simulated", workspace.structure(cut), settings.alone)
    return workspace.measured(kind, lambda: memory(workspace.graph, cut, settings).total)


def _norms(graph: ChannelGraph, cut: Cut) -> int:
    return sum(norm.mean in cut.shapes for norm in graph.batch_norms)


def _counts(node: fx.Node) -> bool:
    """It only counts batches, in a buffer that nobody else reads."""
    changed = node.args[0] if node.args else None
    buffer = isinstance(changed, fx.Node) and changed.op == "get_attr"
    return writes(node.target) and buffer and not node.users and len(changed.users) == 1  # type: ignore[union-attr]


def _leaves_nothing(node: fx.Node) -> bool:
    """A batch norm's running statistics are for batch norms only."""
    if not is_batch_norm(node):
        return True
    running = [one for one in (node.args[MEAN], node.args[VARIANCE]) if isinstance(one, fx.Node)]
    return all(is_batch_norm(user) for one in running for user in one.users)
