"""accuracy-at-true-bytes, which the paper does not show: accuracy over what the largest device really allocated.

CIFAR10, ResNet20, iid. SLT runs twice: planned as in the paper, and planned by true peak within the true peak of the
width-scaled model. At 0.125 the latter has no plan. FedAvg with activation checkpointing would be the control at equal
bytes; training cannot do that yet, so it is not here.
"""

from __future__ import annotations

from pathlib import Path

from strata.experiments import drawing
from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.figures import Line
from strata.experiments.formats import Table, write
from strata.experiments.results import Results
from strata.experiments.setups import IID, label
from strata.experiments.tables import RESNET, notes, record
from strata.sizes import show_bytes

BY_PEAK = (0.25, 0.5)


def accuracy_at_true_bytes(asked: Asked) -> Experiment:
    series = {
        "SLT, planned as in the paper": [_cell("slt", level) for level in RESNET],
        "SLT, planned by peak": [_cell("slt", level, "peak", (("accounting", "peak"),)) for level in BY_PEAK],
        **{label(method): [_cell(method, level) for level in RESNET] for method in ("small", "fedrolex", "fd")},
        "FedAvg": [_cell("fedavg", 1.0)],
    }
    lines = [Line(f"{name}, {cell.level}", cell) for name, cells in series.items() for cell in cells]
    title = "Accuracy over measured peak bytes: CIFAR10, ResNet20, iid"

    def render(results: Results, out: Path) -> list[Path]:
        with drawing.figure(out, "figure") as (axes, pictures):
            place = axes[0][0]
            for colour, (name, cells) in zip(drawing.CYCLE, series.items(), strict=False):
                points = [(one.peak_bytes / 2**20, one) for cell in cells if (one := results.of(cell))]
                if points:
                    spread = [one.std or 0.0 for _, one in points]
                    place.errorbar([x for x, _ in points], [one.mean for _, one in points], spread, marker="o",
                                   markersize=4, capsize=2, color=colour, label=name)  # fmt: skip
            place.set(xlabel="measured peak of the largest device in MiB", ylabel="accuracy in %", ylim=(0, None))
            if place.get_legend_handles_labels()[0]:
                place.figure.legend(loc="outside lower center", ncols=2)
        found = {line.label: results.of(line.cell) for line in lines}
        rows = [
            (name, "–", "–", "–", "–") if one is None
            else (name, str(one), show_bytes(one.peak_bytes), str(one.rounds), str(one.seeds))
            for name, one in found.items()
        ]  # fmt: skip
        records = []
        for line in lines:
            one = found[line.label]
            records.append({"label": line.label, **record(line.cell, one), "peak_bytes": one and one.peak_bytes})
        said = notes([{name: one for name, one in found.items() if one is not None}])
        about = (
            "Peak: the most tensor bytes alive in a real training step of the largest device over the whole run. "
            "By true peak no plan of SLT fits what the 0.125 model needs. The control, FedAvg with activation "
            "checkpointing at equal bytes, is missing: training has no checkpointing."
        )
        table = Table(title, ("run", "accuracy in %", "measured peak", "rounds", "seeds"), tuple(rows))
        return write(out, title, [table], records, [said[0], about], pictures)

    return Experiment("accuracy-at-true-bytes", title, runs_of([line.cell for line in lines], asked), render)


def _cell(method: str, level: float, variant: str = "", options: tuple[tuple[str, str], ...] = ()) -> Cell:
    return Cell("cifar10", "resnet20", IID, (level,), method, variant, options)
