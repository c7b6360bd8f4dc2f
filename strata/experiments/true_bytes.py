"""table-true-bytes, which the paper does not show: accuracy beside the bytes that a device's training really takes.

CIFAR10, ResNet20, iid. SLT runs twice: planned as in the paper, and planned by true peak within the true peak of the
width-scaled model (at 0.125 there is no such plan). So does the small model: at the constraint, and as wide as SLT's
true peak allows, which is the fair comparison. The control is FedAvg, whose devices hold the whole model because they
recompute activations: within the bytes of SLT at the same constraint, or not at all. Recomputing changes no bit, so its
accuracy is that of the FedAvg runs. Micro-batches go lower still, but batch norm sees only these few samples: other
training, hence runs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strata.core.sizes import show_bytes
from strata.execution import Execution, flops, memory
from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.setups import IID, SETUPS, label
from strata.experiments.tables import HOMOGENEOUS, RESNET, notes, record
from strata.graph import ChannelGraph
from strata.methods import SLT
from strata.models.loading import load_model
from strata.results import figures
from strata.results.appearance import colour_of
from strata.results.tables import Table, write
from strata.runs.launch import make_method
from strata.training import LocalTraining, Workspace
from strata.training.memory import measured_bytes

BATCH = 32
BY_PEAK = (0.25, 0.5)
MICRO = {0.125: 8, 0.25: 16}  # the largest powers of two with which the control fits what SLT takes (tested)
SMALL = {0.125: 0.249, 0.25: 0.343, 0.5: 0.593}  # the widest small model within the true peak of SLT (tested)
FEDAVG = Cell("cifar10", "resnet20", IID, (1.0,), "fedavg")
WAYS: tuple[tuple[int | str | None, int | None], ...] = (  # segments, samples at a time
    (None, None), (2, None), (3, None), (4, None), ("auto", None), (None, 16), (None, 8), (None, 4), ("auto", 16),
    ("auto", 8), ("auto", 4),
)  # fmt: skip
COLOURS = {"SLT, planned by true peak": "#4aa3d8", "FedAvg + checkpointing, micro-batches": "#cf4d76"}
TITLE = "Accuracy at true peak bytes: CIFAR10, ResNet20, iid"


@dataclass(frozen=True)
class Contender:
    """A method at a constraint, or a control within the bytes that SLT takes there."""

    name: str
    level: float
    cell: Cell  # whose runs give the accuracy
    series: str  # of the figure
    control: LocalTraining | None = None

    @property
    def paper_bytes(self) -> int | None:
        return None if self.control else planned_bytes(self.cell, "paper")

    @property
    def peak_bytes(self) -> int:
        """Methods: in closed form, which is equal to what is measured. Controls: of a real training step."""
        return control_bytes(self.control) if self.control else planned_bytes(self.cell, "peak")

    @property
    def fits(self) -> bool:
        return self.control is None or self.peak_bytes <= slt_bytes(self.level)


def table_true_bytes(asked: Asked) -> Experiment:
    table_rows, title = rows(), asked.titled(TITLE)

    def render(results: Results, out: Path) -> list[Path]:
        found: list[tuple[Contender, CellResult | None]] = []
        for row in table_rows:
            every: Sequence[CellResult | None] = results.every(row.cell) if row.fits else ()
            found += [(row, one) for one in every or (None,)]
        lengths = results.lengths(row.cell for row in table_rows)
        with figures.figure(out, "figure", 1, max(1, len(lengths)), sharey=True) as (axes, pictures):
            for place, rounds in zip(axes[0], lengths, strict=False):
                own = {row: one for row, one in found if one is not None and one.rounds == rounds}
                _draw(place, own, results.of(FEDAVG, rounds))
                place.set(title=f"{rounds} rounds")
            axes[0][0].set_ylabel("accuracy in %")
            _legend(axes[0])
        records = [_record(row, one) for row, one in found]
        said = notes([{row.name: one for row, one in found if one is not None}])
        return write(out, title, [_table(found), _ways()], records, [said[0], *_about()], pictures)

    return Experiment("table-true-bytes", title, runs_of([row.cell for row in table_rows], asked), render)


def rows() -> list[Contender]:
    every = []
    for level in RESNET:
        for method in HOMOGENEOUS:
            cell = Cell("cifar10", "resnet20", IID, (level,), method)
            every.append(Contender(label(method), level, cell, label(method)))
            if method == "slt" and level in BY_PEAK:
                by_peak = Cell("cifar10", "resnet20", IID, (level,), method, "peak", (("accounting", "peak"),))
                every.append(Contender("SLT, planned by true peak", level, by_peak, "SLT, planned by true peak"))
            if method == "small":
                wider, name = SMALL[level], f"small model of {SMALL[level]:g}, within SLT's true peak"
                every.append(Contender(name, level, Cell("cifar10", "resnet20", IID, (wider,), method), label(method)))
        name = "FedAvg + checkpointing"
        every.append(Contender(name, level, FEDAVG, name, LocalTraining(BATCH, activation_checkpointing="auto")))
        if level in MICRO:
            micro = MICRO[level]
            options = (("activation_checkpointing", "auto"), ("micro_batch", micro))
            cell = Cell("cifar10", "resnet20", IID, (1.0,), "fedavg", f"checkpointing-micro-{micro}", options)
            settings = LocalTraining(BATCH, micro_batch=micro, activation_checkpointing="auto")
            every.append(
                Contender(f"{name}, micro-batches of {micro}", level, cell, f"{name}, micro-batches", settings)
            )
    return every


# --- bytes -----------------------------------------------------------------------------------------------------------


@cache
def network() -> ChannelGraph:
    setup = SETUPS[FEDAVG.data]
    return ChannelGraph(load_model(FEDAVG.model, setup.classes, setup.input), setup.input)


@cache
def planned_bytes(cell: Cell, accounting: str) -> int:
    """Of the largest step."""
    method = make_method(cell.request(0, Asked()), network())
    if isinstance(method, SLT):
        cuts = [method.plan.cut(step.step) for step in method.plan.steps]
    else:
        cuts = [method.cut_for(0, 0)]
    return max(memory(network(), cut, Execution(BATCH), accounting).total for cut in cuts)


@cache
def workspace() -> Workspace:
    return Workspace(network())


@cache
def control_bytes(settings: LocalTraining) -> int:
    return measured_bytes(workspace(), network().full(), settings)


def slt_bytes(level: float) -> int:
    return planned_bytes(Cell("cifar10", "resnet20", IID, (level,), "slt"), "peak")


# --- rendering -------------------------------------------------------------------------------------------------------


def _table(found: Sequence[tuple[Contender, CellResult | None]]) -> Table:
    lines = []
    for row, one in found:
        if not row.fits:
            more = show_bytes(row.peak_bytes - slt_bytes(row.level))
            accuracy = ("does not fit", f"{more} over SLT", "")
        elif one is None:
            accuracy = ("–", "–", "–")
        else:
            accuracy = (str(one), str(one.rounds), str(one.seeds))
        counted = "" if row.paper_bytes is None else show_bytes(row.paper_bytes)
        lines.append((f"{row.level:g}", row.name, counted, show_bytes(row.peak_bytes), _in_runs(row, one), *accuracy))
    bytes_columns = ("paper's count", "true peak", "peak in the runs")
    header = ("constraint", "method", *bytes_columns, "accuracy in %", "rounds", "seeds")
    return Table("Methods, and FedAvg within the true peak of SLT", header, tuple(lines))


def _in_runs(row: Contender, one: CellResult | None) -> str:
    """The runs behind FedAvg + checkpointing are those of plain FedAvg, whose bytes are others."""
    return "" if row.cell == FEDAVG else "–" if one is None else show_bytes(one.peak_bytes)


def _ways() -> Table:
    """What training the whole model takes."""
    plain = flops(network(), network().full())
    lines = []
    for segments, micro in WAYS:
        settings = LocalTraining(BATCH, micro_batch=micro, activation_checkpointing=segments)
        count, more = 1, 0
        if segments is not None:
            placement = workspace().placement(network().full(), settings)
            assert placement is not None
            count, more = len(placement.cuts) + 1, placement.recomputed_flops
        peak = control_bytes(settings)
        within = [f"{level:g}" for level in RESNET if peak <= slt_bytes(level)]
        shown = f"{count} (auto)" if segments == "auto" else str(count)
        same_bits = "yes" if micro is None else "no"
        work = f"+ {100 * more / plain.train:.0f} %"
        fits = ", ".join(within) or "none"
        lines.append((shown, str(micro or BATCH), show_bytes(peak), work, same_bits, fits))
    header = ("segments", "samples at a time", "measured peak", "FLOPs", "FedAvg's bits", "within SLT's peak at")
    return Table("FedAvg, the whole model at batch 32", header, tuple(lines))


def _about() -> Sequence[str]:
    return (
        "No fair comparison of SLT with the small model: plans by the paper's count use 81 % of their own peak on "
        "average, and here a small model is fitted to that peak; neither is executed at its best. table-frontier gives "
        "all methods the same true bytes.",
        "True peak: the most tensor bytes alive in one training step, of the largest step; methods in closed form, "
        "controls measured in a real step. Paper's count: outputs of all layers that need a gradient, parameters and "
        "their gradients. Peak in the runs: measured by the devices, over all rounds.",
        "FedAvg + checkpointing has the accuracy of the FedAvg runs: recomputing activations changes no bit. Its floor "
        "is what one segment needs: parameters, momentum, gradients, the inputs kept at cuts, and the values and "
        "gradients of the widest residual blocks. It still trains, sends and receives the whole model.",
        "With micro-batches gradients are summed over the batch, but batch norm normalises by these few samples: "
        "another training than FedAvg's, so these rows have runs of their own.",
    )


def _record(row: Contender, one: CellResult | None) -> dict[str, Any]:
    return {
        "row": row.name,
        "constraint": row.level,
        **record(row.cell, one),
        "paper_bytes": row.paper_bytes,
        "true_peak_bytes": row.peak_bytes,
        "run_peak_bytes": one.peak_bytes if one and row.cell != FEDAVG else None,
        "control": row.control is not None,
        "fits": row.fits,
    }


def _draw(axes: Any, found: dict[Contender, CellResult], full: CellResult | None) -> None:
    series: dict[str, list[Contender]] = {}
    for row in found:
        if not (row.control and row.cell == FEDAVG):
            series.setdefault(row.series, []).append(row)
    styles = {**{label(method): colour_of(method) for method in HOMOGENEOUS}, **COLOURS}
    for name, own in series.items():
        points = sorted((row.peak_bytes / 2**20, found[row].mean, found[row].std or 0.0) for row in own)
        x, y, spread = zip(*points, strict=True)
        figures.points(axes, x, y, spread, color=styles[name], label=name)
    if full is not None:
        least, most = (
            control_bytes(LocalTraining(BATCH, activation_checkpointing=way)) / 2**20 for way in ("auto", None)
        )
        style = {"color": colour_of("fedavg"), "label": "FedAvg, with checkpointing to without"}
        axes.plot([least, most], [full.mean] * 2, "--", marker="s", markersize=4, **style)
    axes.set(xlabel="true peak of the largest device in MiB", xlim=(0, None), ylim=(0, None))


def _legend(panels: Sequence[Any]) -> None:
    """One for all panels."""
    drawn = {name: line for panel in panels for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure = panels[0].figure
    figure.set_size_inches(max(5.4, 3.4 * len(panels)), 4.2)
    if drawn:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2)
