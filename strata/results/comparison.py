"""What the runs of a comparison came to: one row for each method over its seeds, and the picture of their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.files import write_json
from strata.results.appearance import shades_of
from strata.results.curves import Curve, over_rounds
from strata.results.figures import band, figure
from strata.results.reading import read_metrics, read_number, read_object, whole
from strata.results.statistics import deviation, mean
from strata.results.verdict import Candidate, in_words
from strata.runs.entries import Entry

_MEANS = ("upload_bytes", "download_bytes", "train_flops", "seconds")


@dataclass(frozen=True)
class Row:
    """One method, over all seeds. Accuracies from 0 to 1."""

    method: str
    accuracies: tuple[float, ...]
    upload_bytes: float  # mean over seeds, as are the next two and the seconds
    download_bytes: float
    train_flops: float
    peak_bytes: int  # of the largest device of all seeds
    seconds: float
    curve: Curve
    over_bytes: int = 0  # that a device took above its budget

    @property
    def mean(self) -> float:
        return mean(self.accuracies)

    @property
    def std(self) -> float | None:
        return deviation(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "accuracy_mean": self.mean,
            "accuracy_std": self.std,
            "accuracies": list(self.accuracies),
            "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes,
            "train_flops": self.train_flops,
            "peak_bytes": self.peak_bytes,
            "over_budget_bytes": self.over_bytes,
            "seconds": self.seconds,
            "rounds": list(self.curve.rounds),
            "curve": list(self.curve.mean),
        }


def write_comparison(folders: Mapping[str, Sequence[Path]], out: Path) -> list[Row]:
    """Of the finished runs of each method, one per seed: the rows, also as summary.json, and the picture."""
    rows = [gather(method, of_seeds) for method, of_seeds in folders.items()]
    write_json(out / "summary.json", [row.to_json() for row in rows])
    draw(rows, out)
    return rows


def verdict(rows: Sequence[Row]) -> list[str]:
    """Who is the most accurate within which true bytes, in words; nothing where there is one alone."""
    known = [Candidate(row.method, row.mean, row.std, len(row.accuracies), row.peak_bytes) for row in rows]
    return in_words(known, "within {} of true bytes on a device") if len(known) > 1 else []


def gather(method: str, folders: Sequence[Path]) -> Row:
    """What these finished runs, one per seed, came to."""
    summaries = [_costs(folder / "summary.json") for folder in folders]
    return Row(
        method=method,
        accuracies=tuple(summary["accuracy"] for summary in summaries),
        peak_bytes=max(int(summary["peak_bytes"]) for summary in summaries),
        curve=over_rounds([read_metrics(folder) for folder in folders]),
        over_bytes=max(_over(folder / "summary.json") for folder in folders),
        **{key: mean(summary[key] for summary in summaries) for key in _MEANS},
    )


def _costs(path: Path) -> dict[str, float]:
    """The numbers of a summary."""
    summary = read_object(path)
    return {key: read_number(path, summary, key) for key in ("accuracy", "peak_bytes", *_MEANS)}


def _over(path: Path) -> int:
    budget = read_object(path).get("budget")
    return whole(budget.get("over_bytes")) or 0 if isinstance(budget, Mapping) else 0


def draw(rows: Sequence[Row], out: Path) -> None:
    """accuracy.png and accuracy.svg: mean over seeds, with a band of one standard deviation."""
    from matplotlib.ticker import MaxNLocator

    with figure(out, "accuracy", size=(7, 4.2)) as (grid, _):
        axes = grid[0][0]
        for row, colour in zip(rows, shades_of([Entry.of(row.method).method for row in rows]), strict=True):
            name = f"{row.method} ({100 * row.mean:.1f} %)"
            band(axes, row.curve.rounds, row.curve.percent, row.curve.spread, color=colour, label=name)
        axes.set(xlabel="round", ylabel="test accuracy in %", ylim=(0, 100))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")
