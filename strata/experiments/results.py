"""What finished runs came to, read from their folders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from strata.experiments.base import Cell
from strata.federation.files import read_json
from strata.federation.folder import read_metrics


def finished(folder: Path) -> bool:
    """The summary is written last. Weights may have been left out where results were copied from."""
    return (folder / "summary.json").exists()


@dataclass(frozen=True)
class Outcome:
    """One cell over its seeds, all with the same number of rounds. Accuracies in percent."""

    cell: Cell
    rounds: int
    folders: tuple[Path, ...]

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        return [read_json(folder / "summary.json") for folder in self.folders]

    @cached_property
    def accuracies(self) -> list[float]:
        return [100 * summary["accuracy"] for summary in self.summaries]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None from a single seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def seeds(self) -> int:
        return len(self.folders)

    @property
    def peak_bytes(self) -> int:
        """Of the largest device, as measured in training."""
        return max(int(summary["peak_bytes"]) for summary in self.summaries)

    @property
    def bn(self) -> str:
        return "/".join(sorted({str(summary["bn"]) for summary in self.summaries}))

    @cached_property
    def accounting(self) -> str:
        """How the bytes of the plan were counted; methods that scale width are given their ratio and count none."""
        found = {str(read_json(folder / "plan.json").get("accounting", "-")) for folder in self.folders}
        return "/".join(sorted(found))

    @cached_property
    def request(self) -> dict[str, Any]:
        """What the first seed's run was asked for."""
        return dict(read_json(self.folders[0] / "config.json").get("request") or {})

    @cached_property
    def metrics(self) -> list[list[dict[str, Any]]]:
        """Per seed, one record a round."""
        return [read_metrics(folder) for folder in self.folders]

    def __str__(self) -> str:
        return show(self.mean, self.std)


def show(mean: float, std: float | None) -> str:
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


@dataclass(frozen=True)
class Results:
    """The runs below `root`. `rounds`: those asked for, by cell name; None takes the longest finished runs of each."""

    root: Path
    rounds: Mapping[str, int] | None = None

    def of(self, cell: Cell) -> Outcome | None:
        """None where no run of this cell is finished."""
        place = self.root / cell.name
        if self.rounds is not None:
            chosen = [self.rounds[cell.name]] if cell.name in self.rounds else []
        else:
            numbers = (path.name.removeprefix("rounds-") for path in place.glob("rounds-*"))
            chosen = sorted((int(number) for number in numbers if number.isdigit()), reverse=True)
        for rounds in chosen:
            seeds = (path for path in (place / f"rounds-{rounds}").glob("seed-*") if finished(path))
            folders = tuple(sorted(seeds, key=lambda path: int(path.name.removeprefix("seed-"))))
            if folders:
                return Outcome(cell, rounds, folders)
        return None
