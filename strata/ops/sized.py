"""SizedOp: one operation of a cut graph with its shape, which byte and FLOP rules read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """An argument that is another SizedOp's value."""

    name: str


@dataclass(slots=True)
class SizedOp:
    name: str
    kind: str  # input, parameter, buffer, op, cut, output
    target: Any
    inputs: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: Any  # tuple, or a list of tuples for operations with several outputs; None for sizes
    dtype: torch.dtype | None
    requires_grad: bool
    state_name: str | None = None
    module: str = ""
    leaf_outputs: int = 0


def itemsize(op: SizedOp) -> int:
    return op.dtype.itemsize if op.dtype is not None else 4
