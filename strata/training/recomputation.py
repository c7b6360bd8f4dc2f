"""Activation checkpointing on a device: the forward pass in segments (execution/segments.py), where the execution asks
for it. A device's update has the same bits as without."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from strata.execution.placement import place
from strata.execution.segments import Placement, Segmented
from strata.training import kernels
from strata.training.submodels import structure

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut

_segmented: weakref.WeakKeyDictionary[nn.Module, dict[Placement, Segmented]] = weakref.WeakKeyDictionary()
_placements: weakref.WeakKeyDictionary[ChannelGraph, dict[Any, Placement]] = weakref.WeakKeyDictionary()


def forward_of(graph: ChannelGraph, cut: Cut, module: nn.Module, execution: Execution) -> Callable[[Tensor], Tensor]:
    """How a device runs the cut's `module` in training."""
    if execution.activation_checkpointing is None:
        return module
    placement = placement_of(graph, cut, execution)
    if not placement.cuts:
        return module
    known = _segmented.setdefault(module, {})
    if placement not in known:
        known[placement] = Segmented(module.train_graph, placement)  # type: ignore[arg-type]
    segmented = known[placement]

    def forward(x: Tensor) -> Tensor:
        # the second run, within backward, has to round like the first
        return segmented(module, x, partial(kernels.own_convolutions, kernels.in_use()))

    return forward


def placement_of(graph: ChannelGraph, cut: Cut, execution: Execution) -> Placement:
    """`place`, remembered: each device of each round asks."""
    assert execution.activation_checkpointing is not None
    known = _placements.setdefault(graph, {})
    key = (structure(graph, cut), execution.activation_checkpointing, execution.at_once)
    if key not in known:
        known[key] = place(graph, cut, execution.activation_checkpointing, execution.at_once)
    return known[key]
