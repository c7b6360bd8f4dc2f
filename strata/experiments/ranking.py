"""Does the order of methods agree with the paper's? By pairs, so that a part of the methods can be judged too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from strata.experiments.cells import CellResult
from strata.experiments.published import PublishedAccuracy
from strata.experiments.setups import label

AGREES, DIFFERS, TIE, NOTHING = "✓", "✗", "tie", "–"


@dataclass(frozen=True)
class Turned:
    """A pair of methods that the paper has the other way round."""

    better: str  # here
    worse: str
    within_std: bool  # the published means differ by less than their standard deviations together


@dataclass(frozen=True)
class Ranking:
    pairs: int  # that could be compared: both run here, and not equal in the paper
    turned: tuple[Turned, ...]
    ties: tuple[tuple[str, str], ...] = ()  # of these pairs, those that our own noise does not let apart

    @property
    def mark(self) -> str:
        if self.turned:
            return DIFFERS
        if not self.pairs:
            return NOTHING
        return TIE if len(self.ties) == self.pairs else AGREES

    def __str__(self) -> str:
        pairs = [f"{label(t.better)} > {label(t.worse)}{'°' if t.within_std else ''}" for t in self.turned]
        pairs += [f"{label(first)} = {label(second)}" for first, second in self.ties]
        return f"{self.mark} {'; '.join(pairs)}".strip()


def rank(ours: Mapping[str, CellResult], published: Mapping[str, PublishedAccuracy]) -> Ranking:
    """`ours`: runs of one length. An order needs a difference beyond the noise that is known of both."""
    pairs, turned, ties = 0, [], []
    for first, second in combinations([method for method in published if method in ours], 2):
        gap = published[first].mean - published[second].mean
        if gap == 0:
            continue
        pairs += 1
        better, worse = (first, second) if ours[first].mean > ours[second].mean else (second, first)
        if abs(ours[first].mean - ours[second].mean) <= math.hypot(ours[first].noise, ours[second].noise):
            ties.append((first, second))
        elif (better == first) != (gap > 0):
            spread = math.hypot(published[first].std, published[second].std)
            turned.append(Turned(better, worse, abs(gap) < spread))
    return Ranking(pairs, tuple(turned), tuple(ties))
