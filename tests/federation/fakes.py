"""A Cut small enough to compute by hand: keeps some rows of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from strata.training import Update


@dataclass(frozen=True)
class RowCut:
    rows: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, kept rows, shape after cutting
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, state: Mapping[str, Tensor], rows: Mapping[str, tuple[int, ...]], frozen: tuple[str, ...] = ()
    ) -> RowCut:
        entries = []
        for name, tensor in state.items():
            kept = rows.get(name, tuple(range(tensor.shape[0])))
            entries.append((name, kept, (len(kept), *tensor.shape[1:])))
        return cls(tuple(entries), frozenset(frozen))

    @property
    def hash(self) -> str:
        return f"{hash((self.rows, self.frozen)):x}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, _, shape in self.rows}

    @property
    def kept(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {name: (rows,) for name, rows, _ in self.rows}

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.rows if name not in self.frozen)

    def extract(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name][list(rows)].clone() for name, rows, _ in self.rows}

    def scatter(self, state: dict[str, Tensor], update: Mapping[str, Tensor]) -> None:
        for name, rows, _ in self.rows:
            if name in update:
                state[name][list(rows)] = update[name]

    def scatter_add(
        self, sums: dict[str, Tensor], counts: dict[str, Tensor], update: Mapping[str, Tensor], weight: float = 1
    ) -> None:
        for name, rows, _ in self.rows:
            if name in update:
                sums[name][list(rows)] += weight * update[name]
                counts[name][list(rows)] += weight


def task(cut: RowCut, round: int = 0, device: int = 0) -> SimpleNamespace:
    return SimpleNamespace(round=round, device=device, cut=cut, levels=())


def update_for(task: SimpleNamespace, value: float = 1.0) -> Update:
    tensors = {name: torch.full(task.cut.shapes[name], value) for name in task.cut.trained}
    return Update(task.round, task.device, tensors, 5, 0.5, 100, task.cut.hash)
