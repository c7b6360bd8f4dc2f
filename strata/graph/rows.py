"""Which channels are chosen together, and in which order: rows for prefix, rolling and random cuts, and for SLT heads.

Slots number all channel ids of a model: leaves first (slot 0 is always there), then meets, which list their leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.graph.channels import ALWAYS, Ids


def floor_of(scale: float, size: int) -> int:
    return math.floor(scale * size + 1e-9)


@dataclass(frozen=True)
class Run:
    """Channels that are chosen together as one ordered row: the coupled outputs of one or more weights."""

    classes: tuple[int, ...]  # slots of coupled classes, in order
    offset: int  # channels before it in the concatenation that it is part of

    def count(self, scale: float) -> int:
        """floor(s * M); within a concatenation floored cumulatively, so that the whole has floor(s * total)."""
        size = len(self.classes)
        return max(1, floor_of(scale, self.offset + size) - floor_of(scale, self.offset))


class Rows:
    """Leaves that meet anywhere are coupled (the branches of a residual add share one set)."""

    def __init__(
        self,
        sources: Mapping[str, tuple[int, ...]],
        leaf_count: int,
        meets: list[np.ndarray],
        vectors: list[np.ndarray],
        concatenations: list[Ids],
    ) -> None:
        """`sources`: the leaf of each output of each weight; `vectors`: all rows of slots that occur in values."""
        self._sources = sources
        self._leaf_count = leaf_count
        self._meets = meets
        couple = _Couples(leaf_count)
        for meet in meets:
            for leaf in meet[1:]:
                couple.join(int(meet[0]), int(leaf))
        self.members: dict[int, list[int]] = {}  # coupled class -> its leaves
        for leaf in range(leaf_count):
            self.members.setdefault(couple.root(leaf), []).append(leaf)
        self.of_source = {name: tuple(couple.root(leaf) for leaf in own) for name, own in sources.items()}
        slices = self._slices(vectors)
        rows = {name: _ordered(c for c in row if c != ALWAYS) for name, row in self.of_source.items()}
        self.pieces: dict[str, list[Run]] = {}  # what an SLT head chooses from, per weight
        ways: dict[int, list[Any]] = {}
        for name, row in rows.items():
            parts = dict(zip(self.of_source[name], slices[name], strict=True))
            self.pieces[name] = _grouped(row, parts, row)
            for c in row:
                ways.setdefault(c, []).append((name, sorted(parts[c])))
        joined = [_ordered(couple.root(self._first_leaf(int(slot))) for slot in v) for v in concatenations]
        runs: list[Run] = []
        placed: set[int] = set()
        for name in sorted(rows, key=lambda n: -len(rows[n])):  # the widest row of a family sets the order
            row = [c for c in rows[name] if c not in placed]
            if row:
                around = next((j for j in joined if row[0] in j), rows[name])
                runs += _grouped(row, {c: str(ways[c]) for c in row}, around)
                placed.update(row)
        self.runs = tuple(sorted(runs, key=lambda run: run.classes[0]))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({len({c for c in row if c != ALWAYS}) for row in self.of_source.values()} - {0}))

    def _slices(self, vectors: list[np.ndarray]) -> dict[str, list[frozenset[int]]]:
        """For each output of each weight, the values that hold only a part of the weight's outputs, this one too.

        Channels that go different ways (halves of a split) are chosen apart, so that neither way is left empty."""
        owners: dict[int, list[str]] = {}
        for name, classes in self._sources.items():
            for leaf in set(classes) - {ALWAYS}:
                owners.setdefault(leaf, []).append(name)
        parts: dict[str, dict[int, set[int]]] = {name: {} for name in self._sources}
        for v, vector in enumerate(vectors):
            slots = np.unique(vector)
            leaves = set(slots[slots < self._leaf_count].tolist()) - {ALWAYS}
            for slot in slots[slots >= self._leaf_count]:
                leaves.update(self._meets[slot - self._leaf_count].tolist())
            held: dict[str, set[int]] = {}
            for leaf in leaves:
                for name in owners.get(leaf, ()):
                    held.setdefault(name, set()).add(leaf)
            for name, some in held.items():
                if len(some) < len(set(self._sources[name]) - {ALWAYS}):
                    for leaf in some:
                        parts[name].setdefault(leaf, set()).add(v)
        return {
            name: [frozenset(parts[name].get(leaf, ())) for leaf in classes] for name, classes in self._sources.items()
        }

    def _first_leaf(self, slot: int) -> int:
        return slot if slot < self._leaf_count else int(self._meets[slot - self._leaf_count][0])


class _Couples:
    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.root(a), self.root(b)))
        self._parent[high] = low


def _grouped(row: list[int], key: Mapping[int, Any], around: list[int]) -> list[Run]:
    """Runs of the row's classes that have the same key; offset in `around` where they stand side by side there."""
    groups: dict[Any, list[int]] = {}
    for c in row:
        groups.setdefault(key[c], []).append(c)
    runs = []
    for classes in groups.values():
        start = around.index(classes[0]) if classes[0] in around else 0
        together = around[start : start + len(classes)] == classes
        runs.append(Run(tuple(classes), start if together else 0))
    return runs


def _ordered(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
