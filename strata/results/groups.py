"""Runs that differ only in their seed belong together: one line with a band, one column in a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.core.sizes import show_bytes
from strata.results.curves import COSTS, Curve, evaluations, over_rounds
from strata.results.reading import RecordedRun, listed, mapping, number, numbers
from strata.results.statistics import deviation, mean
from strata.runs.entries import execution_text

_SEEDED = {"seed", "plan"}  # of a method's settings; a plan's hash holds no seed, but its content is compared instead


@dataclass(frozen=True)
class Standing:
    """What a group has reached and spent, of runs that can be compared: those at the same round, or finished."""

    basis: str  # "all runs", "finished runs" of several, or the "last common round" of runs that are under way
    seeds: tuple[int, ...]  # of the runs that are counted
    round: int  # from 1: after so many rounds
    accuracy: float | None
    std: float | None
    best: float | None  # the highest mean accuracy on the way
    costs: Mapping[str, float | None]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    method: str
    runs: tuple[RecordedRun, ...]

    @property
    def status(self) -> str:
        states = {run.status for run in self.runs}
        return next(state for state in ("running", "unfinished", "finished") if state in states)

    @property
    def done(self) -> int:
        """Rounds that every run of the group has behind it."""
        return min(len(run.records) for run in self.runs)

    @property
    def rounds(self) -> int:
        return max(run.rounds for run in self.runs)

    def standing(self) -> Standing:
        """A mean over seeds at different rounds would say nothing: finished ones count, or the rounds all have had."""
        finished = tuple(run for run in self.runs if run.summary is not None)
        if len({_rounds_done(run) for run in self.runs}) == 1 or len(finished) == len(self.runs):
            return _at_the_end("all runs", self.runs)
        if finished:
            return _at_the_end("finished runs", finished)
        evaluated = [run for run in self.runs if evaluations(run.records)] or self.runs
        rounds = self.curve().rounds
        last = rounds[-1] if rounds else min(map(_rounds_done, evaluated))
        return _at_the_end("last common round", [_until(run, last) for run in evaluated])

    @property
    def peak_bytes(self) -> float | None:
        return max((p for run in self.runs for p in numbers(run.records, "peak_bytes") if p), default=None)

    @property
    def over_budget_bytes(self) -> float:
        """What the worst device took above its budget, where that was counted in true bytes."""
        return max((p for run in self.runs for p in numbers(run.records, "over_budget_bytes") if p), default=0)

    @property
    def privacy(self) -> str:
        """What differential privacy has come to, in the worst run; empty without it."""
        if not any("epsilon" in record for run in self.runs for record in run.records):
            return ""
        spent = [value for run in self.runs for value in numbers(run.records, "epsilon") if value is not None]
        return f"ε ≤ {max(spent):.3g}" if spent else "no finite ε"  # it only grows

    @property
    def dropped(self) -> int:
        return sum(len(drops(record)) for run in self.runs for record in run.records)

    def curve(self) -> Curve:
        return _curve(self.runs)

    def per_class(self) -> list[float | None]:
        """Mean over the finished runs."""
        found = (mapping(run.summary).get("per_class_accuracy") for run in self.runs)
        rows = [row for row in found if isinstance(row, list)]
        if not rows or len({len(row) for row in rows}) != 1:
            return []
        columns = [[value for row in rows if (value := number(row[c])) is not None] for c in range(len(rows[0]))]
        return [mean(column) if column else None for column in columns]


def _curve(runs: Sequence[RecordedRun]) -> Curve:
    return over_rounds([run.records for run in runs])


def _at_the_end(basis: str, runs: Sequence[RecordedRun]) -> Standing:
    """Of each run its final or newest accuracy."""
    found = [run.accuracy for run in runs if run.accuracy is not None]
    return Standing(
        basis=basis,
        seeds=tuple(run.seed for run in runs),
        round=min(map(_rounds_done, runs)),  # finished runs may have stopped early, each in its own round
        accuracy=mean(found) if found else None,
        std=deviation(found),
        best=max(_curve(runs).mean, default=None),
        costs={key: _spent(runs, key) for key in COSTS},
    )


def _rounds_done(run: RecordedRun) -> int:
    return int(run.records[-1]["round"]) + 1 if run.records else 0


def _until(run: RecordedRun, rounds: int) -> RecordedRun:
    """The run as it was after so many rounds."""
    return replace(run, records=tuple(record for record in run.records if int(record["round"]) < rounds))


def _spent(runs: Sequence[RecordedRun], key: str) -> float | None:
    """The mean over runs."""
    sums = [sum(value for value in numbers(run.records, key) if value is not None) for run in runs]
    return mean(sums) if any(run.records for run in runs) else None


def drops(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [mapping(one) for one in listed(record.get("dropped"))]


# --- which belong together, and what to call them ----------------------------------------------------------------


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """In the order of their first run."""
    sorted_in: dict[str, list[RecordedRun]] = {}
    for run in runs:
        sorted_in.setdefault(_key(run), []).append(run)
    members = []
    for key, together in sorted_in.items():
        if len({run.seed for run in together}) < len(together):  # the same run twice: not a sample, show each
            members += [[run] for run in together]
        else:
            members.append(sorted(sorted_in[key], key=lambda run: run.seed))
    labels = _labels(members)
    return [Group(label, runs[0].method, tuple(runs)) for label, runs in zip(labels, members, strict=True)]


def _key(run: RecordedRun) -> str:
    """All that makes a run what it is, but the seed."""
    settings = {key: value for key, value in run.settings.items() if key != "seed"}
    settings["method"] = {k: v for k, v in mapping(run.settings.get("method")).items() if k not in _SEEDED}
    steps = run.plan.get("steps"), run.plan.get("levels")
    request = {k: run.request.get(k) for k in ("constraints", "budgets", "model", "init")}
    return json.dumps([settings, steps, request], sort_keys=True, default=str)


# What a label may say beyond the method, in this order, where it tells groups apart
_DISTINGUISHING: tuple[tuple[str, str], ...] = (
    ("model", "{}"), ("data", "{}"), ("partition", "{}"), ("budget", "{}"), ("variant", "{}"), ("schedule", "{}"),
    ("execution", "{}"),
    ("rounds", "{} rounds"), ("devices", "{} devices"), ("per_round", "{} a round"), ("lr", "lr {}"), ("bn", "bn {}"),
    ("dropout", "dropout {}"),
)  # fmt: skip


def _labels(members: Sequence[Sequence[RecordedRun]]) -> list[str]:
    firsts = [runs[0] for runs in members]
    facts = [_facts(run) for run in firsts]
    labels = [run.method for run in firsts]
    for key, text in _DISTINGUISHING:
        if len(set(labels)) == len(labels):
            break
        alike = Counter(labels)
        kinds = {label: {fact[key] for fact, own in zip(facts, labels, strict=True) if own == label} for label in alike}
        labels = [
            f"{label} · {text.format(fact[key])}" if len(kinds[label]) > 1 and fact[key] != "" else label
            for label, fact in zip(labels, facts, strict=True)
        ]
    alike = Counter(labels)  # told apart by nothing above: by where they are
    return [f"{label} ({run.name})" if alike[label] > 1 else label for label, run in zip(labels, firsts, strict=True)]


def _facts(run: RecordedRun) -> dict[str, str]:
    settings, method = run.settings, mapping(run.settings.get("method"))
    return {
        "model": str(run.request.get("model") or mapping(settings.get("model")).get("class", "")),
        "data": str(mapping(settings.get("data")).get("name", "")),
        "partition": str(settings.get("partition", "")),
        "budget": budget_text(run),
        "variant": str(method.get("variant") or ""),
        "schedule": str(run.plan.get("schedule") or ""),
        "execution": execution_text(mapping(settings.get("training"))),
        **{key: str(settings.get(key, "")) for key in ("rounds", "devices", "per_round", "lr", "bn", "dropout")},
    }


def budget_text(run: RecordedRun) -> str:
    """The constraint or the bytes a device may use, as asked for."""
    request, method = run.request, mapping(run.settings.get("method"))
    ratios = request.get("constraints") or method.get("constraints")
    if isinstance(ratios, list) and ratios:
        return "/".join(f"{ratio:g}" if (ratio := number(value)) is not None else str(value) for value in ratios)
    sizes = request.get("budgets") or [run.plan.get("budget_bytes")]
    known = [number(size) for size in sizes] if isinstance(sizes, list) else []
    return "/".join(show_bytes(int(size)) for size in known if size is not None)
