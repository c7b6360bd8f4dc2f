"""Coordinate-wise median and trimmed mean: a few devices that lie cannot move a coordinate far.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
Per coordinate over the devices that trained it, so with cuts the number of values differs from one coordinate to the
next. These rules must see all values at once: they alone keep a round's updates, and work on one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.core.errors import BadInput

if TYPE_CHECKING:
    from strata.graph import Cut

FEWEST = 3  # updates a round needs: of one or two values, none can be outvoted
DEFAULT_SHARE = "0.1"
COLUMNS = 1 << 18  # coordinates sorted at a time


@dataclass(frozen=True)
class Robust:
    """`trim`: the share of values left out at each end; None: the median."""

    trim: Fraction | None = None

    def cut_off(self, values: int) -> int:
        """How many of so many values are left out at each end; one or two always stay.

        Rounded up, so that a tenth of five devices is one of them.
        """
        most = (values - 1) // 2
        return most if self.trim is None else min(math.ceil(self.trim * values), most)


def updates_needed(quorum: int, robust: Robust | None) -> int:
    """For a round to count."""
    return max(quorum, FEWEST) if robust else quorum


def parse_aggregation(text: str) -> Robust | None:
    """'mean' -> None, 'median', 'trimmed', 'trimmed:0.2'."""
    rule, colon, share = text.partition(":")
    if rule in ("mean", "median") and not colon:
        return None if rule == "mean" else Robust()
    try:
        if rule != "trimmed":
            raise ValueError
        trim = Fraction(share if colon else DEFAULT_SHARE)  # of the decimal: 0.1 of 30 must be 3, not a little more
        if not 0 < trim < Fraction(1, 2):
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise BadInput(
            f"the aggregation is mean, median or trimmed:SHARE with a share above 0 and below 0.5, not {text!r}"
        ) from None
    return Robust(trim)


class KeptUpdates:
    """All updates of a round, until each coordinate has its median or trimmed mean."""

    def __init__(self, state: Mapping[str, Tensor], rule: Robust) -> None:
        self._state, self._rule = state, rule
        self._kept: list[tuple[Cut, Mapping[str, Tensor]]] = []

    @property
    def updates(self) -> int:
        return len(self._kept)

    @property
    def changed(self) -> Iterable[str]:
        trained = {name for _, update in self._kept for name in update}
        return [name for name in self._state if name in trained]

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        assert weight == 1.0, "a median has no weights"
        self._kept.append((cut, update))

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name in self.changed:
            value = self._state[name]
            rows = [(cut, update[name]) for cut, update in self._kept if name in update]
            table = torch.full((len(rows), *value.shape), math.nan, dtype=value.dtype)
            for row, (cut, tensor) in zip(table, rows, strict=True):
                cut.scatter({name: row}, {name: tensor})
            middle, touched = [], []
            for columns in table.reshape(len(rows), -1).split(COLUMNS, dim=1):
                centre, count = self._centre(columns.double())
                middle.append(centre.to(value.dtype))
                touched.append(count > 0)
            yield name, torch.cat(middle).view(value.shape), torch.cat(touched).view(value.shape)

    def _centre(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Per column the mean of what is left after cutting off both ends, and how many values there were.

        NaN is "not trained" (what devices send is finite) and sorts last. Rows are added one by one, lowest first:
        the bits depend on nothing else.
        """
        counts = (~columns.isnan()).sum(0)
        ends = torch.tensor([self._rule.cut_off(count) if count else 0 for count in range(len(columns) + 1)])[counts]
        total = torch.zeros(columns.shape[1], dtype=columns.dtype)
        for rank, row in enumerate(columns.sort(dim=0).values):
            total += torch.where((rank >= ends) & (rank < counts - ends), row, 0.0)
        return total / (counts - 2 * ends).clamp(min=1), counts
