"""A mini-batch taken in parts: its samples wait as they are stored and become what the network takes in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.data.augmentation import Drawn, augmented

if TYPE_CHECKING:
    from torch import Tensor

    from strata.data.samples import Batch
    from strata.training.settings import LocalTraining


def parts(x: Batch | Waiting, size: int) -> Iterator[Batch]:
    """The inputs of a mini-batch, so many samples at a time."""
    return x.split(size) if isinstance(x, Waiting) else zip(*(one.split(size) for one in x), strict=True)


@dataclass(frozen=True)
class Waiting:
    """What is random was drawn for the whole batch, so the parts together are what the whole would have been."""

    stored: Batch
    drawn: tuple[Drawn | None, ...]  # per input; None: it goes to the network as it is
    settings: LocalTraining

    @property
    def tensors(self) -> Batch:
        return (*self.stored, *(numbers for drawn in self.drawn for numbers in drawn or ()))

    def split(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.stored[0]), size):
            part = slice(start, start + size)
            yield tuple(self._made(one[part], drawn, part) for one, drawn in zip(self.stored, self.drawn, strict=True))

    def _made(self, stored: Tensor, drawn: Drawn | None, part: slice) -> Tensor:
        if drawn is None:
            return stored
        settings = self.settings
        own = tuple(numbers[..., part] for numbers in drawn)
        return augmented(stored, settings.augmentation, own, settings.mean, settings.std)
