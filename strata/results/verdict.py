"""Which way is the most accurate for which cost, in words. Ties are said as ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIKE = 0.03  # costs that differ by less are the same cost
TIE = 0.005  # accuracies that differ by less are a tie, where a single seed says nothing of how far they scatter


@dataclass(frozen=True)
class Candidate:
    label: str
    accuracy: float  # mean over seeds, 0 to 1
    std: float | None  # over seeds; None: of one seed
    seeds: int
    cost: float  # bytes


@dataclass(frozen=True)
class Best:
    """Of all that cost up to `cost`: the most accurate, and whoever cannot be told from it."""

    cost: float
    leaders: tuple[Candidate, ...]  # the most accurate first


def is_tie(one: Candidate, other: Candidate) -> bool:
    """Within half a point, or within two standard errors of the difference."""
    gap = abs(one.accuracy - other.accuracy)
    if one.std is None or other.std is None:
        return gap < TIE
    error = math.sqrt(one.std**2 / one.seeds + other.std**2 / other.seeds)
    return gap < max(TIE, 2 * error)


def frontier(candidates: Sequence[Candidate]) -> list[Best]:
    """By rising cost, wherever more cost buys another leader."""
    found: list[Best] = []
    for cost in _costs(candidates):
        affordable = [one for one in candidates if one.cost <= cost]
        top = max(affordable, key=lambda one: (one.accuracy, -one.cost))
        ties = [one for one in affordable if one is not top and is_tie(one, top)]
        leaders = (top, *sorted(ties, key=lambda one: -one.accuracy))
        known = {one.label for one in found[-1].leaders} if found else set()
        if not known & {one.label for one in leaders}:  # else more cost buys nothing that can be told
            found.append(Best(cost, leaders))
    return found


def _costs(candidates: Sequence[Candidate]) -> list[float]:
    """Ascending; of those that are alike, the largest."""
    found: list[float] = []
    for cost in sorted(one.cost for one in candidates):
        if found and cost <= found[-1] * (1 + ALIKE):
            found[-1] = cost
        else:
            found.append(cost)
    return found


def in_words(candidates: Sequence[Candidate], within: str) -> list[str]:
    """A sentence for each place of the frontier. `within`: a text with {} for a cost, such as "within {} of memory"."""
    from strata.core.sizes import show_bytes

    sentences = []
    for best in frontier(candidates):
        top, *ties = best.leaders
        where = within.format(show_bytes(round(best.cost)))
        if ties:
            names = " and ".join([", ".join(one.label for one in best.leaders[:-1]), best.leaders[-1].label])
            values = " and ".join([", ".join(_percent(one) for one in best.leaders[:-1]), _percent(best.leaders[-1])])
            said = f"{names} tie ({values} %)"
        else:
            said = f"{top.label} is the most accurate ({_percent(top)} %)"
        sentences.append(f"{where[0].upper()}{where[1:]}, {said}.")
    return sentences


def _percent(one: Candidate) -> str:
    return f"{100 * one.accuracy:.1f}" + (f" ± {100 * one.std:.1f}" if one.std is not None else "")
