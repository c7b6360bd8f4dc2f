"""What a round's updates go into: per coordinate the mean over the devices that trained it, or a method's own.

Sums run in float64 and in task order: the bits are the same however the updates arrive, and the mean of equal values
is that value. One pair of full-size tensors per trained parameter, however many devices there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from strata.graph import Cut


class Aggregate(Protocol):
    """Made anew for every attempt at a round; updates are added one by one, in task order."""

    @property
    def updates(self) -> int: ...

    @property
    def changed(self) -> Iterable[str]:
        """The parameters that get new values."""

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None: ...

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, what the devices make of it, which coordinates have that), in the server's dtype and state order."""


class RunningMean:
    """Coordinates that nobody trained keep the server's value."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.updates = 0

    @property
    def changed(self) -> Iterable[str]:
        return self.sums

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        for name in update:
            if name not in self.sums:
                self.sums[name] = torch.zeros(self._state[name].shape, dtype=torch.float64)
                self.counts[name] = torch.zeros_like(self.sums[name])
        cut.scatter_add(self.sums, self.counts, {name: tensor.double() for name, tensor in update.items()}, weight)
        self.updates += 1

    def add_sum(self, cut: Cut, changes: Mapping[str, Tensor], devices: int) -> None:
        """What so many devices changed in all, where nobody knows what each of them did: their mean, so many times."""
        values = {
            name: cut.extract_one(name, self._state[name]).double() + change / devices
            for name, change in changes.items()
        }
        self.add(cut, values, float(devices))
        self.updates += devices - 1

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name in self._state:
            if name in self.sums:
                touched = self.counts[name] > 0
                mean = self.sums[name] / self.counts[name].clamp(min=torch.finfo(torch.float64).tiny)
                yield name, mean.to(self._state[name].dtype), touched


class MeanOverAll(RunningMean):
    """Devices that left a coordinate as it was count too: what only some train moves by their share of the change."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self._weight = 0.0

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        super().add(cut, update, weight)
        self._weight += weight

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, _, touched in super().means():
            old = self._state[name]
            mean = (self.sums[name] + (self._weight - self.counts[name]) * old.double()) / self._weight
            yield name, mean.to(old.dtype), touched


class ClassRows(RunningMean):
    """A classifier's rows are averaged over the devices that hold the class: those that sent other values than they
    got. `rows`: the classifier's parameters, one entry of their first dim for each class."""

    def __init__(self, state: Mapping[str, Tensor], rows: Iterable[str]) -> None:
        super().__init__(state)
        self._rows = frozenset(rows)

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        of_classes = {name: tensor for name, tensor in update.items() if name in self._rows}
        super().add(cut, {name: tensor for name, tensor in update.items() if name not in of_classes}, weight)
        for name, tensor in of_classes.items():
            sums = self.sums.setdefault(name, torch.zeros(self._state[name].shape, dtype=torch.float64))
            counts = self.counts.setdefault(name, torch.zeros_like(sums))
            changed = (tensor != cut.extract_one(name, self._state[name])).reshape(len(tensor), -1).any(1)
            held = changed.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor).double()
            own, owners = torch.zeros_like(sums), torch.zeros_like(counts)
            cut.scatter({name: own}, {name: tensor.double() * held})
            cut.scatter({name: owners}, {name: held})
            sums += weight * own
            counts += weight * owners
