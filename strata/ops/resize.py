"""How a call is written for a cut graph: sizes inside its arguments change, everything else stays.

`resize=` of an `Operator` gets the node and what a cut keeps of its first input and of its output, and gives the call.
Operators whose arguments hold no sizes need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from strata.ops.channels import FxNode
from strata.ops.operator import operator_of

aten = torch.ops.aten


class Along(NamedTuple):
    """What a cut keeps of a value: a mask along its one channel dim."""

    dim: int
    mask: np.ndarray
    batched: bool  # the dim holds channels of all samples (batch x heads), so its size grows with the batch
    whole: bool  # all are kept

    @property
    def kept(self) -> int:
        return int(self.mask.sum())

    @property
    def positions(self) -> np.ndarray:
        return np.flatnonzero(self.mask)


class Call(NamedTuple):
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Resize = Callable[[FxNode, Along | None, Along | None], Call]


def resize(node: FxNode, before: Along | None, after: Along | None) -> Call:
    """The node's call with sizes for what is kept of its first input (before, as cut for it) and output (after)."""
    if (before is None or before.whole) and (after is None or after.whole):
        return unchanged(node)
    change = operator_of(node.target).resize
    return change(node, before, after) if change else unchanged(node)


def unchanged(node: FxNode) -> Call:
    return Call(node.target, node.args, dict(node.kwargs))


def take(value: Any, dim: int, positions: np.ndarray) -> Call:
    """A view where the positions are evenly spaced, else a copy."""
    steps = np.diff(positions)
    if len(positions) == 1 or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 1
        return Call(aten.slice.Tensor, (value, dim, int(positions[0]), int(positions[-1]) + 1, step), {})
    return Call("index_select", (value, dim, tuple(positions.tolist())), {})
