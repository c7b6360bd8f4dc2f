"""table-frontier, which the paper does not show: the most accurate model in N true bytes.

Every method gets the same bytes, counted as a device's tensors really take them, and its best execution within them
(`--lean`): micro-batches and recomputation as needed, the widest model or the fewest frozen layers that then fit. SLT
is planned by these bytes, not by the paper's count. CIFAR10; ResNet20, where activations rule, and ResNet18, where
parameters do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.sizes import show_bytes
from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.setups import IID, NONIID, label
from strata.experiments.tables import notes, record
from strata.results import figures
from strata.results.appearance import colour_of
from strata.results.tables import Table, write
from strata.runs.config import WARMUP

MIB = 2**20
WHOLE = "fedavg"
WAYS = (WHOLE, "small", "slt", "fedrolex")  # with one kind of device HeteroFL is the small model
TITLE = "Accuracy within true bytes, every method at its best execution: CIFAR10"


@dataclass(frozen=True)
class Panel:
    """A network on one partition of the data, under several budgets."""

    model: str
    partition: str
    budgets: tuple[float, ...]  # MiB
    ways: tuple[str, ...] = WAYS
    too_large: tuple[tuple[float, str], ...] = ()  # budgets and methods for which nothing fits (tested)
    # Of a budget that the whole model fits: how many samples at a time the others have in a batch norm at the least,
    # twice as many as the whole model. With as few as it has, they would be the whole model (tested).
    norm_samples: tuple[tuple[float, int], ...] = ()
    warmup: int = WARMUP  # rounds: without, lean ways lose their first ten (docs/fit.md)
    plainly: float | None = None  # MiB, with which the whole model needs nothing lean: what there is to reach

    @property
    def title(self) -> str:
        return f"{label(self.model)}, {label(self.partition)}{'' if self.warmup else ', without a warm-up'}"

    def cell(self, budget: float, method: str) -> Cell:
        options: tuple[tuple[str, Any], ...] = (("budgets", (int(budget * MIB),)), ("lean", True))
        names = []
        fewest = dict(self.norm_samples).get(budget) if method != WHOLE else None
        if fewest is not None:
            options += (("norm_samples", fewest),)
            names.append(f"norm-{fewest}")
        if self.warmup:
            options += (("warmup", self.warmup),)
            names.append(f"warmup-{self.warmup}")
        return Cell("cifar10", self.model, self.partition, (), method, "-".join(names), options)

    def ways_at(self, budget: float) -> tuple[str, ...]:
        """Without FedRolex where the whole model fits: its window would be nearly all of it."""
        if budget == self.plainly:
            return (WHOLE,)
        fits = (budget, WHOLE) not in self.too_large
        return tuple(method for method in self.ways if not (fits and method == "fedrolex"))

    @property
    def all_budgets(self) -> tuple[float, ...]:
        return self.budgets if self.plainly is None else (*self.budgets, self.plainly)

    def cells(self) -> dict[tuple[float, str], Cell]:
        every = [(budget, method) for budget in self.all_budgets for method in self.ways_at(budget)]
        return {one: self.cell(*one) for one in every if one not in self.too_large}


PANELS = (
    Panel(
        "resnet20",
        IID,
        (2.5, 4, 6.5, 10.6, 16),
        plainly=52,
        too_large=((2.5, WHOLE), (4, WHOLE)),
        norm_samples=((6.5, 8), (10.6, 16), (16, 32)),
    ),
    Panel("resnet20", NONIID, (6.5,), (WHOLE, "small", "slt"), norm_samples=((6.5, 8),)),
    Panel(
        "resnet20",
        IID,
        (4, 6.5),
        (WHOLE, "small", "slt"),
        too_large=((4, WHOLE),),
        norm_samples=((6.5, 8),),
        warmup=0,
    ),
    *(
        Panel(
            model,
            IID,
            (48, 96),
            (WHOLE, "small", "slt"),
            plainly=257,
            too_large=((48, WHOLE), (48, "slt"), (96, WHOLE)),
        )
        for model in ("resnet18", "resnet18_gn")
    ),
)


def table_frontier(asked: Asked) -> Experiment:
    def render(results: Results, out: Path) -> list[Path]:
        found = {(panel, *at): results.every(cell) for panel in PANELS for at, cell in panel.cells().items()}
        tables = [_table(panel, found) for panel in PANELS]
        finished = {f"{at} {one.rounds}": one for at, every in found.items() for one in every}
        records = [_record(at, cell, one) for at, cell in _every_cell() for one in found[at] or (None,)]
        with figures.figure(out, "figure", size=(5.4, 4.0)) as (axes, pictures):
            _draw(axes[0][0], PANELS[0], results.at_one_length(PANELS[0].cells().values()))
        return write(out, TITLE, tables, records, [notes([finished])[0], *_about()], pictures)

    return Experiment("table-frontier", TITLE, runs_of([cell for _, cell in _every_cell()], asked), render)


At = tuple[Panel, float, str]
Found = dict[At, list[CellResult]]


def _every_cell() -> list[tuple[At, Cell]]:
    return [((panel, *at), cell) for panel in PANELS for at, cell in panel.cells().items()]


def _table(panel: Panel, found: Found) -> Table:
    lines = []
    for budget in panel.all_budgets:
        for method in panel.ways_at(budget):
            name = "whole model" if method == WHOLE else label(method)
            if (budget, method) in panel.too_large:
                lines.append((f"{budget:g} MiB", name, "does not fit", *[""] * 5))
                continue
            every: Sequence[CellResult | None] = found[panel, budget, method] or (None,)
            lines += [(f"{budget:g} MiB", name, *_columns(one)) for one in every]
    header = ("budget", "method", "accuracy in %", "measured peak", "upload", "training", "rounds", "seeds")
    return Table(panel.title, header, tuple(lines))


def _columns(one: CellResult | None) -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6
    upload, training = (max(one.numbers(key)) for key in ("upload_bytes", "train_flops"))
    work = f"{training / 1e12:.3g} TFLOP"
    return str(one), show_bytes(one.peak_bytes), show_bytes(round(upload)), work, str(one.rounds), str(one.seeds)


def _about() -> Sequence[str]:
    return (
        "Budget: tensor bytes of a device's training step by `peak`; library scratch and the process itself come on "
        "top. Measured peak: of the largest device over all rounds. Upload and training: all devices of one run.",
        "Every method runs lean: the cheapest execution (micro-batch, recomputation, released gradients) with which "
        "its widest cut fits; `plan.json` and `config.json` of each run say which. Under micro-batches batch norm sees "
        "only the samples of one part. Where the whole model fits, the others are held to at least twice as many "
        "samples at a time as it has: with as few, the widest of them would be the whole model.",
        f"The learning rate of every method warms up over {WARMUP} rounds, but in the table that says otherwise.",
        "Whole model: FedAvg. FedRolex trains the same width as the small model, and is left out where the whole model "
        "fits: its window would be nearly all of it. With one kind of device HeteroFL is the small model. The largest "
        "budget of a table is what the whole model takes plainly.",
    )


def _record(at: At, cell: Cell, one: CellResult | None) -> dict[str, Any]:
    return {"budget_mib": at[1], **record(cell, one), "run_peak_bytes": one and one.peak_bytes}


def _draw(axes: Any, panel: Panel, results: Results) -> None:
    """`results`: all of one length."""
    cells = panel.cells()
    for method in panel.ways:
        finished = [
            (budget, results.of(cells[budget, method])) for budget in panel.budgets if (budget, method) in cells
        ]
        own = [(budget, one) for budget, one in finished if one is not None]
        if own:
            x, y = [budget for budget, _ in own], [one.mean for _, one in own]
            name = "whole model" if method == WHOLE else label(method)
            figures.points(axes, x, y, [one.std or 0.0 for _, one in own], color=colour_of(method), label=name)
    axes.set(xlabel="true bytes of a device in MiB", ylabel="accuracy in %", ylim=(0, 100))
    axes.set_xlim(0, 1.05 * max(panel.budgets))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
