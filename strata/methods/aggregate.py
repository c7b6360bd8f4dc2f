"""What a round's updates go into: the run's own (federation/aggregation.py), or a method's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

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
