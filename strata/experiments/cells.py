"""What finished runs of cells came to, read from their folders: CELL/rounds-N/seed-N."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from strata.experiments.base import Asked, Cell
from strata.results.curves import Records
from strata.results.reading import is_finished, mapping, read_metrics, read_number, read_object
from strata.results.statistics import deviation, mean, show

LAST = 5  # evaluations of a run, by which its noise is judged: in its last fifth, usually


@dataclass(frozen=True)
class CellResult:
    """One cell over its seeds, all with the same number of rounds. Accuracies in percent."""

    cell: Cell
    rounds: int
    folders: tuple[Path, ...]

    @cached_property
    def summaries(self) -> list[Mapping[str, Any]]:
        return [read_object(folder / "summary.json") for folder in self.folders]

    @cached_property
    def accuracies(self) -> list[float]:
        return [100 * value for value in self.numbers("accuracy")]

    @property
    def mean(self) -> float:
        return mean(self.accuracies)

    @property
    def std(self) -> float | None:
        return deviation(self.accuracies)

    @cached_property
    def noise(self) -> float:
        """By how much the mean may be off, as far as these runs tell: the deviation over seeds; of a single one, that
        over its last evaluations; 0 where there are not even two of them."""
        if self.std is not None:
            return self.std
        evaluated = [record["accuracy"] for record in self.metrics[0] if record.get("accuracy") is not None]
        return 100 * (deviation(evaluated[-LAST:]) or 0.0)

    @property
    def seeds(self) -> int:
        return len(self.folders)

    @property
    def peak_bytes(self) -> int:
        """Of the largest device, as measured in training."""
        return int(max(self.numbers("peak_bytes")))

    @property
    def bn(self) -> str:
        return _joined(summary.get("bn") or "-" for summary in self.summaries)  # networks without one

    @cached_property
    def accounting(self) -> str:
        """How the bytes of the plan were counted; methods that scale width are given their ratio and count none."""
        return _joined(read_object(folder / "plan.json").get("accounting", "-") for folder in self.folders)

    @cached_property
    def origins(self) -> set[tuple[str, bool]]:
        """Of each run: what it was trained on, by name and digest, and whether its network began with the weights of
        before 0.2, whose config.json had no format number."""
        found = set()
        for folder in self.folders:
            config = read_object(folder / "config.json")
            data = mapping(mapping(config.get("settings")).get("data"))
            found.add((f"{data.get('name', self.cell.data)} {data.get('sha256', '')}".strip(), "format" not in config))
        return found

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """What the first seed's run was asked for."""
        return mapping(read_object(self.folders[0] / "config.json").get("request"))

    @cached_property
    def metrics(self) -> Sequence[Records]:
        """Per seed, one record a round."""
        return [read_metrics(folder) for folder in self.folders]

    def numbers(self, key: str) -> list[float]:
        both = zip(self.folders, self.summaries, strict=True)
        return [read_number(folder / "summary.json", summary, key) for folder, summary in both]

    def __str__(self) -> str:
        return show(self.mean, self.std)


def _joined(values: Iterable[Any]) -> str:
    return "/".join(sorted(set(map(str, values))))


@dataclass(frozen=True)
class Results:
    """The finished runs below `root`. What they may be restricted to: a number of rounds for each cell name, the names
    of some cells, the seeds below a number. With settings that were asked for, cells are those that have them.

    Runs of different length are different experiments, and nothing here mixes them: either each length is shown by
    itself (`lengths`), or the one that most cells have (`at_one_length`)."""

    root: Path
    rounds: Mapping[str, int] | None = None
    cells: frozenset[str] | None = None
    seeds: int | None = None
    asked: Asked = Asked()  # whose settings the cells have

    def of(self, cell: Cell, rounds: int | None = None) -> CellResult | None:
        """Its runs of this length, or the longest; None where none is finished."""
        if rounds is None:
            rounds = max(self.lengths([cell]), default=None)
        if rounds is None:
            return None
        cell = self.asked.varied(cell)
        folders = self._folders(cell, rounds)
        return CellResult(cell, rounds, folders) if folders else None

    def every(self, cell: Cell) -> list[CellResult]:
        """One of each length, ascending."""
        return [one for rounds in self.lengths([cell]) if (one := self.of(cell, rounds)) is not None]

    def lengths(self, cells: Iterable[Cell]) -> list[int]:
        """The numbers of rounds with which some of the cells have finished, ascending."""
        return sorted({rounds for cell in cells for rounds in self._lengths(cell)})

    def at_one_length(self, cells: Iterable[Cell]) -> Results:
        """Restricted to the length with which the most of these cells have finished, the longer of equals."""
        known = {cell: self._lengths(cell) for cell in dict.fromkeys(map(self.asked.varied, cells))}
        counted = Counter(rounds for own in known.values() for rounds in own)
        if not counted:
            return self
        best = max(counted, key=lambda rounds: (counted[rounds], rounds))
        return replace(self, rounds={cell.name: best for cell in known})

    def _lengths(self, cell: Cell) -> list[int]:
        cell = self.asked.varied(cell)
        found = _numbered(self.root / cell.name, "rounds-")
        wanted = None if self.rounds is None else self.rounds.get(cell.name)
        return [n for n in found if (self.rounds is None or n == wanted) and self._folders(cell, n)]

    def _folders(self, cell: Cell, rounds: int) -> tuple[Path, ...]:
        if self.cells is not None and cell.name not in self.cells:
            return ()
        seeds = _numbered(self.root / cell.name / f"rounds-{rounds}", "seed-")
        wanted = (n for n in sorted(seeds) if self.seeds is None or n < self.seeds)
        return tuple(seeds[n] for n in wanted if is_finished(seeds[n]))


def _numbered(place: Path, prefix: str) -> dict[int, Path]:
    """rounds-500, seed-0 and the like, by their number; seed-0-old is not ours."""
    found = {path.name.removeprefix(prefix): path for path in place.glob(f"{prefix}*")}
    return {int(number): path for number, path in found.items() if number.isascii() and number.isdigit()}
