"""Curves of runs: accuracy over rounds, and the highest accuracy so far over what it has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from strata.results.reading import number, numbers
from strata.results.statistics import deviation, mean

Records = Sequence[Mapping[str, Any]]  # a run's metrics, one record a round

COSTS = ("upload_bytes", "download_bytes", "train_flops", "seconds")


@dataclass(frozen=True)
class Curve:
    """Accuracy (0 to 1) over the rounds in which all runs were evaluated. Costs are what had been spent by then."""

    rounds: tuple[int, ...]  # from 1: after so many rounds
    mean: tuple[float, ...]
    std: tuple[float | None, ...]  # None from a single run
    costs: Mapping[str, tuple[float, ...]]
    runs: int  # those that were evaluated at all

    @property
    def percent(self) -> list[float]:
        return [100 * value for value in self.mean]

    @property
    def spread(self) -> list[float]:
        """The deviation in percent; 0 from a single run."""
        return [100 * (value or 0.0) for value in self.std]


@dataclass(frozen=True)
class Point:
    """Where one run was evaluated."""

    accuracy: float
    costs: Mapping[str, float]


def over_rounds(runs: Sequence[Records]) -> Curve:
    """The mean over runs, one for each seed."""
    evaluated = [points for records in runs if (points := evaluations(records))]
    rounds = sorted(set.intersection(*map(set, evaluated))) if evaluated else []
    columns = [[points[round] for points in evaluated] for round in rounds]
    accuracies = [[point.accuracy for point in column] for column in columns]
    costs = {key: tuple(mean(point.costs[key] for point in column) for column in columns) for key in COSTS}
    return Curve(tuple(rounds), tuple(map(mean, accuracies)), tuple(map(deviation, accuracies)), costs, len(evaluated))


def evaluations(records: Records) -> dict[int, Point]:
    """By round, counted from 1."""
    spent = {key: list(accumulate(value or 0.0 for value in numbers(records, key))) for key in COSTS}
    found = {}
    for at, record in enumerate(records):
        accuracy = number(record.get("accuracy"))
        if accuracy is not None:
            found[int(record["round"]) + 1] = Point(accuracy, {key: spent[key][at] for key in COSTS})
    return found


def highest_so_far(records: Records, cost: str) -> list[tuple[float, float]]:
    """At each evaluation (cost so far, highest accuracy in percent so far). cost: upload_bytes or train_flops."""
    best, points = 0.0, []
    for point in evaluations(records).values():
        best = max(best, 100 * point.accuracy)
        points.append((point.costs[cost], best))
    return points


def cost_to_reach(records: Records, cost: str, accuracy: float) -> float | None:
    """None where this run never does."""
    return next((spent for spent, best in highest_so_far(records, cost) if best >= accuracy), None)


def mean_cost_to_reach(runs: Sequence[Records], cost: str, accuracy: float) -> float | None:
    """None unless every run does."""
    reached = []
    for records in runs:
        spent = cost_to_reach(records, cost, accuracy)
        if spent is None:
            return None
        reached.append(spent)
    return mean(reached)


def steps(records: Records) -> tuple[list[int], list[int]]:
    """Rounds from 1, and the step in each."""
    return [record["round"] + 1 for record in records], [record["step"] for record in records]
