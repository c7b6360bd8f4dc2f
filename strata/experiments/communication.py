"""figure-communication: the highest accuracy so far over upload and over FLOPs, and what each method needs for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.setups import IID, SETUPS, label
from strata.experiments.tables import PAIRS, Column, notes, record, results_of
from strata.results import figures
from strata.results.appearance import colour_of
from strata.results.curves import highest_so_far, mean_cost_to_reach
from strata.results.tables import Table, write

COSTS = (("upload_bytes", "upload in GB", 1e9), ("train_flops", "training in PFLOP", 1e15))


def figure_communication(asked: Asked) -> Experiment:
    """iid; the constraints of the paper's curves are not stated: all levels, one figure for each, with FedAvg."""
    pairs = [pair for pair in PAIRS if pair[0] != "femnist"]
    columns = [
        Column(data, model, IID, (level,), ("slt", "small", "fedrolex", "fd"))
        for data, model, levels in pairs
        for level in levels
    ]
    full = {data: Cell(data, model, IID, (1.0,), "fedavg") for data, model, _ in pairs}
    title = asked.titled("Highest accuracy so far over upload and FLOPs")

    def render(results: Results, out: Path) -> list[Path]:
        tables, records, files, every = [], [], [], []
        for column in (each for one in columns for each in one.by_length(results) if each.rounds):
            found = results_of(column, results)
            if one := results.of(full[column.data], column.rounds):
                found["fedavg"] = one
            every.append(found)
            level = f"{column.constraints[0]:g}"
            files += draw(found, out, f"figure-{column.data}-{level}-{column.rounds}")
            name = f"{label(column.data)}, {label(column.model)} at {level}, {column.rounds} rounds"
            tables.append(needed_table(name, found, SETUPS[column.data].classes))
            records += needed_records(found, SETUPS[column.data].classes)
        said = notes(every)
        about = (
            "Cost at the first evaluation at or above the accuracy, mean over seeds; – where not all seeds reach it; "
            "in brackets, how many times SLT's. Upload counts trained parameters of all devices, FLOPs are those of "
            "training. What is needed is known as finely as a run was evaluated: every "
            f"{_intervals(every)} rounds here."
        )
        return write(out, title, tables, records, [said[0], about, said[-1]], files)

    cells = [cell for column in columns for cell in column.cells()]
    return Experiment("figure-communication", title, runs_of([*cells, *full.values()], asked), render)


def _intervals(every: Iterable[Mapping[str, CellResult]]) -> str:
    found = {int(result.request.get("eval_every") or 1) for results_of in every for result in results_of.values()}
    return ", ".join(map(str, sorted(found))) or "–"


def draw(found: Mapping[str, CellResult], out: Path, name: str) -> list[Path]:
    """Every seed is a line of its own: the costs at which seeds improve differ."""
    with figures.figure(out, name, 1, len(COSTS), sharey=True) as (axes, pictures):
        for place, (cost, text, unit) in zip(axes[0], COSTS, strict=True):
            for method, result in found.items():
                for number, records in enumerate(result.metrics):
                    points = highest_so_far(records, cost)
                    x, y = [spent / unit for spent, _ in points], [best for _, best in points]
                    shown = None if number else label(method)
                    place.step(x, y, where="post", color=colour_of(method), label=shown, alpha=0.9)
            place.set(xscale="log", xlabel=text)
        axes[0][0].set(ylabel="highest accuracy in %", ylim=(0, None))
        axes[0][0].legend()
    return pictures


def thresholds(found: Mapping[str, CellResult], classes: int) -> list[float]:
    """Whole tens that some method reaches, above chance; whole fives where that gives fewer than three."""
    best = max(
        (max((best for _, best in highest_so_far(records, "upload_bytes")), default=0.0))
        for result in found.values()
        for records in result.metrics
    )
    step = 10 if best >= 30 else 5
    return [float(step * n) for n in range(1, math.floor(best / step) + 1) if step * n * classes > 100]


def needed(found: Mapping[str, CellResult], cost: str, accuracy: float) -> dict[str, float | None]:
    return {method: mean_cost_to_reach(result.metrics, cost, accuracy) for method, result in found.items()}


def needed_table(name: str, found: Mapping[str, CellResult], classes: int) -> Table:
    rows = []
    for cost, text, unit in COSTS:
        for accuracy in thresholds(found, classes):
            spent = needed(found, cost, accuracy)
            rows.append((f"{text} to {accuracy:g} %", *(_show(spent, method, unit) for method in found)))
    return Table(name, ("needed", *map(label, found)), tuple(rows))


def _show(spent: Mapping[str, float | None], method: str, unit: float) -> str:
    own, base = spent[method], spent.get("slt")
    if own is None:
        return "–"
    ratio = f" ({own / base:.3g}×)" if base and method != "slt" else ""
    return f"{own / unit:.3g}{ratio}"


def needed_records(found: Mapping[str, CellResult], classes: int) -> list[dict[str, Any]]:
    return [
        {
            **record(result.cell, result),
            "to_accuracy": accuracy,
            **{cost: mean_cost_to_reach(result.metrics, cost, accuracy) for cost, _, _ in COSTS},
        }
        for accuracy in thresholds(found, classes)
        for result in found.values()
    ]
