"""The paper's figures that come from runs of the tables, or of one sweep.

Where the paper does not say at which constraint a figure was made, the choice is ours and is named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.setups import IID, label
from strata.experiments.tables import PAIRS, RESNET, Column, homogeneous, notes, record, write_table
from strata.results import figures
from strata.results.appearance import colour_of, cycle
from strata.results.curves import over_rounds, steps
from strata.results.tables import Table, write


def figure_motivation(asked: Asked) -> Experiment:
    """FedRolex and FD against the small model over the memory reduction; the runs are those of table-iid."""
    pairs = [(data, model) for data, model, _ in PAIRS if data != "cifar100"]
    columns = [
        replace(column, methods=tuple(method for method in column.methods if method != "slt"))
        for data, model in pairs
        for column in homogeneous(data, model, IID, RESNET)
    ]
    title = asked.titled("FedRolex and FD against a small model")

    def render(results: Results, out: Path) -> list[Path]:
        files = write_table("table-iid", title, columns, results, out)
        with figures.figure(out, "figure", 1, len(pairs)) as (axes, pictures):
            for place, pair in zip(axes[0], pairs, strict=True):
                own = [column for column in columns if (column.data, column.model) == pair]
                _over_reduction(place, own, results.at_one_length(cell for column in own for cell in column.cells()))
                place.set(title=f"{label(pair[0])}, {label(pair[1])}", xlabel="memory reduction")
            axes[0][0].set_ylabel("accuracy in %")
            _legend(axes[0][0])
        return [*files, *pictures]

    return Experiment(
        "figure-motivation", title, runs_of([cell for column in columns for cell in column.cells()], asked), render
    )


def _over_reduction(axes: Any, columns: Sequence[Column], results: Results) -> None:
    for method in ("small", "fedrolex", "fd"):
        found = {}
        for column in sorted(columns, key=lambda column: -column.constraints[0]):
            # at full width all methods are FedAvg
            cell = column.cell("fedavg" if column.constraints == (1.0,) else method)
            found[1 / column.constraints[0]] = results.of(cell)
        accuracies(axes, found, label=label(method), color=colour_of(method))
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1×", "2×", "4×", "8×"])
    axes.set_ylim(bottom=0)


def accuracies(axes: Any, found: Mapping[float, CellResult | None], **style: Any) -> None:
    """Over what was varied, where a run is finished."""
    there = {x: one for x, one in found.items() if one is not None}
    spread = [one.std or 0.0 for one in there.values()]
    figures.points(axes, list(there), [one.mean for one in there.values()], spread, **style)


def figure_steps(asked: Asked) -> Experiment:
    """Accuracy and step over rounds. Constraints (ours): 0.25 for ResNets, 0.33 for DenseNet40."""
    cells = [
        Cell("cifar100", "densenet40", IID, (0.33,), "slt"),
        Cell("cifar10", "resnet20", IID, (0.25,), "slt"),
        Cell("tinyimagenet", "resnet44", IID, (0.25,), "slt"),
    ]
    title = asked.titled("Accuracy and step of SLT over rounds")

    def render(results: Results, out: Path) -> list[Path]:
        lines = [Line(f"{label(c.data)}, {label(c.model)} at {c.level}", c) for c in cells]
        with figures.figure(out, "figure", 1, len(cells)) as (axes, pictures):
            for place, line in zip(axes[0], lines, strict=True):
                place.set(title=line.label, xlabel="round")
                found = results.of(line.cell)
                if found is not None:
                    accuracy_and_steps(place, found)
            axes[0][0].set_ylabel("accuracy in %")
        return sweep_table(title, "network", lines, results, out, pictures)

    return Experiment("figure-steps", title, runs_of(cells, asked), render)


def accuracy_and_steps(axes: Any, found: CellResult) -> None:
    """As in the paper: accuracy green, steps black on an axis of their own."""
    curve = over_rounds(found.metrics)
    figures.band(axes, curve.rounds, curve.percent, curve.spread, color="#009E73")
    other = axes.twinx()
    other.step(*steps(found.metrics[0]), where="mid", color="black", linewidth=1)
    other.set(ylabel="step n", ylim=(0, None))
    other.grid(visible=False)
    other.spines["right"].set_visible(True)


@dataclass(frozen=True)
class Line:
    """One curve or point of a figure, and what it is called."""

    label: str
    cell: Cell


def figure_limited_randomness(asked: Asked) -> Experiment:
    """FD whose sets of channels come from a pool of |I|; the paper sweeps up to 500 without naming the points."""

    def cell(method: str, name: str = "", **options: Any) -> Cell:
        return Cell("cifar10", "resnet20", IID, (0.25,), method, name, tuple(options.items()))

    sizes = (1, 2, 5, 10, 20, 50, 100, 200, 500)
    pools = [Line(f"FD, |I| = {n}", cell("fd", f"pool-{n}", variant="pool", pool=n)) for n in sizes]
    references = [
        Line("FD, new set each round, all devices alike", cell("fd", "shared", variant="shared")),
        Line("FD, new set each round and device", cell("fd")),
        Line("FedRolex", cell("fedrolex")),
        Line("small model", cell("small")),
    ]
    title = asked.titled("FD with limited randomness: CIFAR10, ResNet20 at 0.25")

    def render(results: Results, out: Path) -> list[Path]:
        results = results.at_one_length(line.cell for line in (*pools, *references))
        with figures.figure(out, "figure") as (axes, pictures):
            place = axes[0][0]
            found = {float(n): results.of(line.cell) for n, line in zip(sizes, pools, strict=True)}
            accuracies(place, found, color=colour_of("fd"), label="FD from a pool")
            for line, style in zip(references, ("--", ":", "-.", "--"), strict=True):
                if one := results.of(line.cell):
                    colour = colour_of(line.cell.method)
                    place.axhline(one.mean, linestyle=style, color=colour, linewidth=1, label=line.label)
            if any(found.values()):  # without a point there is nothing that an axis of logarithms could show
                place.set(xscale="log")
            place.set(xlabel="number of sets |I|", ylabel="accuracy in %", ylim=(0, None))
            _legend(place, below=True)
        return sweep_table(title, "sets", [*pools, *references], results, out, pictures)

    lines = [line.cell for line in (*pools, *references)]
    return Experiment("figure-limited-randomness", title, runs_of(lines, asked), render)


def figure_ablation(asked: Asked) -> Experiment:
    """A narrower head for fewer frozen layers. Constraint 0.25 and the fractions are our choice."""
    fractions = (0.25, 0.5, 0.75, 1.0)
    pairs = (("cifar10", "resnet20"), ("tinyimagenet", "resnet44"))

    def cell(data: str, model: str, fraction: float) -> Cell:
        plain = Cell(data, model, IID, (0.25,), "slt")
        options = (("head_fraction", fraction),)
        return plain if fraction == 1 else replace(plain, variant=f"head-{fraction:g}", options=options)

    lines = [
        Line(f"{label(data)}, {label(model)}, {fraction:g} s_n", cell(data, model, fraction))
        for data, model in pairs
        for fraction in fractions
    ]
    title = asked.titled("Maximising s against more trained layers, at 0.25")

    def render(results: Results, out: Path) -> list[Path]:
        results = results.at_one_length(line.cell for line in lines)  # both data sets have the same full length
        with figures.figure(out, "figure", 1, len(pairs)) as (axes, pictures):
            for place, (data, model) in zip(axes[0], pairs, strict=True):
                found = {fraction: results.of(cell(data, model, fraction)) for fraction in fractions}
                accuracies(place, found, color=colour_of("slt"))
                place.set(title=f"{label(data)}, {label(model)}", xlabel="s_ablation / s_n", xlim=(0, 1.05))
            axes[0][0].set_ylabel("accuracy in %")
        return sweep_table(title, "share of s_n", lines, results, out, pictures)

    return Experiment("figure-ablation", title, runs_of([line.cell for line in lines], asked), render)


def figure_mapping(asked: Asked) -> Experiment:
    """Schedules. Patience shrinks with the rounds (at least 1), so in short runs some of them are one and the same."""
    by_patience: dict[int, list[int]] = {}
    for patience in (5, 15, 25):
        by_patience.setdefault(asked.rounds(patience), []).append(patience)

    def cell(name: str = "", **options: Any) -> Cell:
        return Cell("cifar10", "resnet20", IID, (0.25,), "slt", name, tuple(options.items()))

    lines = [Line("cumulative", cell())]
    lines += [Line(name, cell(name, schedule=name)) for name in ("paper", "authors", "equal")]
    for patience, printed in by_patience.items():
        name = f"early stopping {', '.join(map(str, printed))}"
        variant = f"early-stopping-{printed[0]}"
        lines.append(Line(name, cell(variant, schedule="early-stopping", patience=patience)))
    title = asked.titled("Mapping of steps to rounds: CIFAR10, ResNet20 at 0.25")

    def render(results: Results, out: Path) -> list[Path]:
        results = results.at_one_length(line.cell for line in lines)
        named = [Line(line.label + _true_patience(line.cell, results.of(line.cell)), line.cell) for line in lines]
        with figures.figure(out, "figure", 1, 2) as (axes, pictures):
            left, right = axes[0]
            for colour, line in zip(cycle(len(named)), named, strict=True):
                if found := results.of(line.cell):
                    curve = over_rounds(found.metrics)
                    figures.band(left, curve.rounds, curve.percent, curve.spread, color=colour, label=line.label)
                    right.step(*steps(found.metrics[0]), where="mid", color=colour)
            left.set(xlabel="round", ylabel="accuracy in %", ylim=(0, None))
            right.set(xlabel="round", ylabel="step n", ylim=(0, None))
            _legend(left, below=True)
        return sweep_table(title, "schedule", named, results, out, pictures)

    return Experiment("figure-mapping", title, runs_of([line.cell for line in lines], asked), render)


def _legend(axes: Any, below: bool = False) -> None:
    if not axes.get_legend_handles_labels()[0]:  # nothing is drawn where no run is finished
        return
    if below:
        axes.figure.legend(loc="outside lower center", ncols=2)
    else:
        axes.legend()


def _true_patience(cell: Cell, found: CellResult | None) -> str:
    """In short runs it is not the paper's, which is in the cell's name."""
    printed = cell.variant.removeprefix("early-stopping-")
    if found is None or not printed.isdigit() or found.request["patience"] == int(printed):
        return ""
    return f" (patience {found.request['patience']} here)"


def sweep_table(
    title: str, what: str, lines: Sequence[Line], results: Results, out: Path, pictures: list[Path]
) -> list[Path]:
    """The numbers behind a figure. `pictures` is filled once its `with figure` has ended."""
    found = {line.label: results.of(line.cell) for line in lines}
    rows = [
        (name, "–", "–", "–") if one is None else (name, str(one), str(one.rounds), str(one.seeds))
        for name, one in found.items()
    ]
    table = Table(title, (what, "accuracy in %", "rounds", "seeds"), tuple(rows))
    records = [{"label": line.label, **record(line.cell, found[line.label])} for line in lines]
    said = notes([{name: one for name, one in found.items() if one is not None}])
    without_ranking = [said[0], "The paper gives no numbers for this figure's curves.", said[-1]]
    return write(out, title, [table], records, without_ranking, pictures)
