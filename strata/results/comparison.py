"""What a comparison came to: a row for each method, the table and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.files import read_json, write_json
from strata.results import colours
from strata.runs.folder import read_metrics


@dataclass(frozen=True)
class Row:
    """One method, over all seeds."""

    method: str
    accuracies: tuple[float, ...]
    upload_bytes: float  # mean over seeds
    download_bytes: float
    train_flops: float
    peak_bytes: int
    seconds: float
    rounds: tuple[int, ...]  # where it was evaluated
    curve: tuple[float, ...]  # mean accuracy there
    spread: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None from a single seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method, "accuracy_mean": self.mean, "accuracy_std": self.std,
            "accuracies": list(self.accuracies), "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes, "train_flops": self.train_flops, "peak_bytes": self.peak_bytes,
            "seconds": self.seconds, "rounds": list(self.rounds), "curve": list(self.curve),
        }  # fmt: skip


def write_comparison(folders: Mapping[str, Sequence[Path]], out: Path) -> list[Row]:
    """Of the finished runs of each method, one per seed: the rows, also as summary.json, and the picture."""
    rows = [gather(method, of_seeds) for method, of_seeds in folders.items()]
    write_json(out / "summary.json", [row.to_json() for row in rows])
    draw(rows, out)
    return rows


def gather(method: str, folders: Sequence[Path]) -> Row:
    """What these runs, one per seed, came to."""
    summaries = [read_json(folder / "summary.json") for folder in folders]
    curves = [
        {r["round"] + 1: r["accuracy"] for r in read_metrics(folder) if r["accuracy"] is not None} for folder in folders
    ]
    rounds = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[round] for curve in curves] for round in rounds]

    def mean(key: str) -> float:
        return statistics.fmean(summary[key] for summary in summaries)

    return Row(
        method, tuple(summary["accuracy"] for summary in summaries), mean("upload_bytes"), mean("download_bytes"),
        mean("train_flops"), max(summary["peak_bytes"] for summary in summaries), mean("seconds"), tuple(rounds),
        tuple(map(statistics.fmean, columns)),
        tuple(statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns),
    )  # fmt: skip


def draw(rows: Sequence[Row], out: Path) -> None:
    """accuracy.png and accuracy.svg: mean over seeds, with a band of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        colour = colours.METHODS[row.method]
        values = [100 * value for value in row.curve]
        axes.plot(row.rounds, values, color=colour, label=f"{row.method} ({100 * row.mean:.1f} %)", linewidth=1.8)
        if any(row.spread):
            low = [value - 100 * spread for value, spread in zip(values, row.spread, strict=True)]
            high = [value + 100 * spread for value, spread in zip(values, row.spread, strict=True)]
            axes.fill_between(row.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy in %", ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    for suffix in ("png", "svg"):
        figure.savefig(out / f"accuracy.{suffix}", dpi=150)
    pyplot.close(figure)
