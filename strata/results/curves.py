"""Curves of runs: accuracy over rounds, and the highest accuracy so far over what it has cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Sequence[Mapping[str, Any]]  # a run's metrics, one record a round


@dataclass(frozen=True)
class Curve:
    """Mean over seeds. Accuracies in percent."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]


def over_rounds(seeds: Sequence[Records]) -> Curve:
    """At the rounds (counted from 1) where all seeds were evaluated."""
    curves = [{r["round"] + 1: 100 * r["accuracy"] for r in records if r["accuracy"] is not None} for records in seeds]
    rounds = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[round] for curve in curves] for round in rounds]
    return Curve(
        tuple(map(float, rounds)),
        tuple(map(statistics.fmean, columns)),
        tuple(statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns),
    )


def highest_so_far(records: Records, cost: str) -> list[tuple[float, float]]:
    """At each evaluation (cost so far, highest accuracy in percent so far). cost: upload_bytes or train_flops."""
    spent, best, points = 0.0, 0.0, []
    for record in records:
        spent += record[cost]
        if record["accuracy"] is not None:
            best = max(best, 100 * record["accuracy"])
            points.append((spent, best))
    return points


def cost_to_reach(records: Records, cost: str, accuracy: float) -> float | None:
    """None where this run never does."""
    return next((spent for spent, best in highest_so_far(records, cost) if best >= accuracy), None)


def mean_cost_to_reach(seeds: Sequence[Records], cost: str, accuracy: float) -> float | None:
    """None unless every seed does."""
    found = [cost_to_reach(records, cost, accuracy) for records in seeds]
    reached = [value for value in found if value is not None]
    return statistics.fmean(reached) if len(reached) == len(found) else None


def steps(records: Records) -> tuple[list[int], list[int]]:
    """Rounds from 1, and the step in each."""
    return [r["round"] + 1 for r in records], [r["step"] for r in records]
