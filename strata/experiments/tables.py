"""The paper's tables of accuracies: ours beside the published value, and whether the order of methods agrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata.experiments.base import Asked, Cell, Experiment, level_text, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.published import PublishedAccuracy, citation, published
from strata.experiments.ranking import rank
from strata.experiments.setups import IID, NONIID, SETUPS, WRITERS, label
from strata.results.statistics import show
from strata.results.tables import Table, write

HOMOGENEOUS = ("slt", "small", "fedrolex", "fd")
HETEROGENEOUS = (*HOMOGENEOUS, "heterofl", "fjord")
RESNET, DENSENET = (0.125, 0.25, 0.5), (0.33, 0.66)
TRAINED_WRITERS = 454  # those with training images in femnist_leaf.npz; of LEAF's 3550 a random choice
PAIRS = (
    ("cifar10", "resnet20", RESNET),
    ("femnist", "resnet20", RESNET),
    ("cifar100", "densenet40", DENSENET),
    ("tinyimagenet", "resnet44", RESNET),
)


@dataclass(frozen=True)
class Column:
    """Methods under the same memory, data and network."""

    data: str
    model: str
    partition: str
    constraints: tuple[float, ...]
    methods: tuple[str, ...]
    rounds: int | None = None  # of the runs that are shown; None: none is finished
    options: tuple[tuple[str, Any], ...] = ()  # of every cell

    def by_length(self, results: Results) -> list[Column]:
        """One for each number of rounds: runs of different length are not compared."""
        return [replace(self, rounds=rounds) for rounds in results.lengths(self.cells())] or [self]

    @property
    def section(self) -> tuple[str, str, str]:
        return self.data, self.model, self.partition

    def cell(self, method: str) -> Cell:
        # the small model is that of the weakest device, whatever others there are: one run serves all of them
        constraints = (min(self.constraints),) if method == "small" else self.constraints
        return Cell(self.data, self.model, self.partition, constraints, method, options=self.options)

    def cells(self) -> list[Cell]:
        return [self.cell(method) for method in self.methods]

    def published(self, table: str) -> dict[str, PublishedAccuracy]:
        return published(table, *self.section, self.constraints)


def homogeneous(data: str, model: str, partition: str, levels: Sequence[float]) -> list[Column]:
    constrained = [Column(data, model, partition, (level,), HOMOGENEOUS) for level in levels]
    return [*constrained, Column(data, model, partition, (1.0,), ("fedavg",))]


def table_iid(asked: Asked) -> Experiment:
    columns = [column for data, model, levels in PAIRS for column in homogeneous(data, model, IID, levels)]
    return _table("table-iid", "Accuracy with iid data", columns, asked)


def table_noniid(asked: Asked) -> Experiment:
    columns = [column for data, model, levels in PAIRS for column in homogeneous(data, model, NONIID, levels)]
    return _table("table-noniid", "Accuracy with non-iid data", columns, asked)


def table_heterogeneous(asked: Asked) -> Experiment:
    """Devices are split equally over the levels. The data are non-iid."""
    densenet = [(0.33, 0.66), (0.33, 0.66, 1.0)]
    resnet = [(0.125, 0.25), (0.125, 0.25, 0.5), (0.125, 0.25, 0.5, 1.0)]
    columns = [Column("cifar100", "densenet40", NONIID, levels, HETEROGENEOUS) for levels in densenet]
    columns += [Column("tinyimagenet", "resnet44", NONIID, levels, HETEROGENEOUS) for levels in resnet]
    return _table("table-heterogeneous", "Accuracy with devices of different memory, non-iid data", columns, asked)


def table_imagenet(asked: Asked) -> Experiment:
    columns = [
        column for partition in (IID, NONIID) for column in homogeneous("imagenet64", "resnet56", partition, RESNET)
    ]
    return _table("table-imagenet", "Accuracy on ImageNet at 64×64", columns, asked)


def table_writers(asked: Asked) -> Experiment:
    """Not of the paper, which deals FEMNIST's images out: each device has those of one writer."""
    columns = [
        replace(column, options=(("devices", TRAINED_WRITERS),))
        for column in homogeneous("femnist", "resnet20", WRITERS, RESNET)
    ]
    return _table("table-writers", "Accuracy on FEMNIST by writer (not in the paper)", columns, asked)


def table_digits(asked: Asked) -> Experiment:
    """Not of the paper: all methods on the data set in the package, in minutes."""
    columns = homogeneous("digits", "resnet20", IID, (0.125, 0.25))
    return _table("table-digits", "Accuracy on digits (not in the paper; a quick try)", columns, asked)


def _table(name: str, title: str, columns: Sequence[Column], asked: Asked) -> Experiment:
    title = asked.titled(title)

    def render(results: Results, out: Path) -> list[Path]:
        return write_table(name, title, columns, results, out)

    return Experiment(name, title, runs_of([cell for column in columns for cell in column.cells()], asked), render)


# --- rendering -----------------------------------------------------------------------------------------------------


def write_table(name: str, title: str, columns: Sequence[Column], results: Results, out: Path) -> list[Path]:
    found = {each: results_of(each, results) for column in columns for each in column.by_length(results)}
    sections = dict.fromkeys(column.section for column in columns)
    begun = dict.fromkeys(column.section for column, ours in found.items() if ours)
    tables = [
        _section(name, {column: ours for column, ours in found.items() if column.section == section})
        for section in begun or sections  # nothing finished at all: what would be there
    ]
    said = notes(found.values())
    if begun and (missing := [_title(section) for section in sections if section not in begun]):
        said.insert(0, f"No run is finished of: {'; '.join(missing)}.")
    records = [record for column, ours in found.items() for record in _records(name, column, ours)]
    return write(out, title, tables, records, said)


def results_of(column: Column, results: Results) -> dict[str, CellResult]:
    every = ((method, results.of(column.cell(method), column.rounds)) for method in column.methods)
    return {method: result for method, result in every if result is not None}


def _section(name: str, found: dict[Column, dict[str, CellResult]]) -> Table:
    columns = list(found)
    methods = list(dict.fromkeys(method for column in columns for method in column.methods))
    rows = [
        (label(method), *(_cell(column, method, ours, column.published(name)) for column, ours in found.items()))
        for method in methods
    ]
    rows.append(("ranking", *(str(rank(ours, column.published(name))) for column, ours in found.items())))
    rows.append(("rounds (full length)", *(f"{c.rounds or '–'} ({SETUPS[c.data].rounds})" for c in columns)))
    rows.append(("seeds", *(_seeds(ours.values()) for ours in found.values())))
    header = ("ours (published), accuracy in %", *(_heading(column, columns) for column in columns))
    return Table(_title(columns[0].section), header, tuple(rows))


def _heading(column: Column, columns: Sequence[Column]) -> str:
    levels = level_text(column.constraints)
    alone = sum(other.constraints == column.constraints for other in columns) == 1
    return levels if alone else f"{levels}, {column.rounds} rounds"


def _title(section: tuple[str, str, str]) -> str:
    return ", ".join(map(label, section))


def _cell(column: Column, method: str, ours: dict[str, CellResult], theirs: dict[str, PublishedAccuracy]) -> str:
    if method not in column.methods:
        return ""
    own = str(ours[method]) if method in ours else "–"
    return f"{own} ({show(theirs[method].mean, theirs[method].std)})" if method in theirs else own


def _seeds(ours: Iterable[CellResult]) -> str:
    return "/".join(map(str, sorted({result.seeds for result in ours}, reverse=True))) or "–"


def _records(name: str, column: Column, ours: dict[str, CellResult]) -> list[dict[str, Any]]:
    theirs = column.published(name)
    ranking = rank(ours, theirs)
    records = []
    for method in column.methods:
        result, value = ours.get(method), theirs.get(method)
        records.append(
            {
                **record(column.cell(method), result),
                "levels": level_text(column.constraints),
                "published_mean": value and value.mean,
                "published_std": value and value.std,
                "published_rounds": SETUPS[column.data].rounds if value else None,
                "ranking": {"✓": "agrees", "✗": "differs", "tie": "tie", "–": None}[ranking.mark],
            }
        )
    return records


def record(cell: Cell, result: CellResult | None) -> dict[str, Any]:
    """The fields that every CSV has; accuracies in percent."""
    std = None if result is None else result.std
    cell = cell if result is None else result.cell  # with the settings asked for
    return {
        "data": cell.data,
        "model": cell.model,
        "partition": cell.partition,
        "levels": cell.level,
        "method": cell.method,
        "variant": cell.variant or None,
        "accuracy_mean": result and round(result.mean, 4),
        "accuracy_std": None if std is None else round(std, 4),
        "seeds": result and result.seeds,
        "rounds": result and result.rounds,
        "bn": result and result.bn,
        "accounting": result and result.accounting,
    }


def _origins(every: Sequence[CellResult]) -> str:
    """What the runs were trained on, and which of them began with other weights than today's."""
    origins = {origin for result in every for origin in result.origins}
    if not origins:
        return ""
    data = f" Data, with the `data.sha256` of config.json: {', '.join(sorted({name for name, _ in origins}))}."
    old = {before for _, before in origins}
    if True not in old:
        return data
    which = "These runs" if False not in old else "Some of these runs"
    return f"{data} {which} are from before 0.2: their networks began with `kaiming_normal_`'s weights, not torch's."


def notes(found: Iterable[dict[str, CellResult]]) -> list[str]:
    """What every table says below itself."""
    every = [result for ours in found for result in ours.values()]
    modes = sorted({result.bn for result in every} - {"-"})
    accountings = sorted({result.accounting for result in every} - {"-"})
    no_mode = "no network that ran has one" if every else "no run is finished"
    return [
        f"Batch norm in evaluation: {', '.join(modes) or no_mode}. "
        f"Accounting of SLT's plans: {', '.join(accountings) or 'no SLT run is finished'}. "
        f"± is the sample standard deviation over seeds; a single seed has none.{_origins(every)}",
        "Ranking: ✓ every pair of methods that ran is in the paper's order, but for ties; ✗ with the pairs that "
        "are not, as they came out here; = the two tie: they differ by no more than our own noise (root of the sum of "
        "squares of both deviations over seeds; of a single seed, over its last 5 evaluations); ° the published means "
        "of that pair differ by less than their standard deviations; – nothing to compare. Accuracy of another number "
        "of rounds than the paper's is not the paper's experiment.",
        f"Published values: {citation()}",
    ]
