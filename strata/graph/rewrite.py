"""The cut graph as a sequence of calls: shared by the submodel that runs and by the counting of its costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from strata.ops.resize import Along, Call, resize, take

if TYPE_CHECKING:
    from strata.graph.graph import KeptTable, Mode


@dataclass(frozen=True)
class InputCut:
    """An input of a node, cut before the node may use it."""

    input: fx.Node
    dim: int
    positions: np.ndarray

    def call(self, value: Any) -> Call:
        return take(value, self.dim, self.positions)


@dataclass(frozen=True)
class CutCall:
    node: fx.Node
    cuts: tuple[InputCut, ...]
    call: Call


def steps(mode: Mode, table: KeptTable) -> Iterator[CutCall]:
    """Each operation with the cuts of its inputs and its resized call (inputs still named by the original nodes)."""
    for node in mode.graph.nodes:
        if node.op != "call_function":
            continue
        cuts = []
        first = node.args[0] if node.args else None
        before: Along | None = None
        if isinstance(first, fx.Node):
            vector = mode.vectors.get(first)
            before = None if isinstance(vector, list) else table.along(vector)
        for requirement in mode.requirements.get(node, ()):
            positions = table.positions(requirement)
            if positions is not None:
                cuts.append(InputCut(requirement.input, requirement.dim, positions))
                if requirement.input is first:
                    mask = table.masks[requirement.need]
                    before = Along(requirement.dim, mask, False, table.counts[requirement.need] == len(mask))
        vectors = mode.vectors.get(node)
        after = None if isinstance(vectors, list) else table.along(vectors)
        yield CutCall(node, tuple(cuts), resize(node, before, after))
