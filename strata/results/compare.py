"""`strata.compare`: several methods on the same model, data and seeds, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from strata.core.errors import BadInput
from strata.data import FederatedData
from strata.methods import Method
from strata.results.comparison import Row, write_comparison
from strata.runs.config import RunConfig
from strata.runs.entries import Entry
from strata.runs.running import run
from strata.training import LocalTraining

AnyMethod = str | Method | type[Method]


def compare(
    model: nn.Module | Callable[[int], nn.Module],
    data: FederatedData,
    methods: Sequence[str] | Mapping[str, AnyMethod],
    *,
    out: str | Path,
    seeds: int = 1,
    seed: int = 0,
    training: LocalTraining | None = None,
    **options: Any,
) -> list[Row]:
    """Trains `model` by each of the methods and seeds, into `out`/METHOD/seed-N; the same call again finishes what is
    unfinished. A row for each method: its accuracies, bytes, FLOPs and curve; also summary.json and accuracy.png.

    model: or a function of the seed that makes one.
    methods: names as `strata compare --methods` takes them, such as ["slt", "small", "fedavg:recompute"], or methods
        by labels of your own, such as {"mine": MyMethod, "slt, equal": strata.SLT(plan)}.
    seeds: how many, from `seed` on.
    training, and all other `options`: as strata.run takes them, the same for every method.
    """
    named = {Entry.of(name).name: name for name in methods} if not isinstance(methods, Mapping) else dict(methods)
    if not named or seeds < 1:
        raise BadInput("give at least one method and one seed to compare")
    folders: dict[str, list[Path]] = {label: [] for label in named}
    for number in range(seed, seed + seeds):
        for label, method in named.items():
            entry = Entry.of(method) if isinstance(method, str) else None
            folder = Path(out) / _folder_name(label, entry) / f"seed-{number}"
            made = model if isinstance(model, nn.Module) else model(number)
            run(
                made,
                data,
                entry.method if entry is not None else method,
                out=folder,
                seed=number,
                training=_executed(training, entry, data),
                resume=(folder / "config.json").exists(),
                **options,
            )
            folders[label].append(folder)
    return write_comparison(folders, Path(out))


def _folder_name(label: str, entry: Entry | None) -> str:
    if entry is not None:
        return entry.folder
    return "".join(c if c.isalnum() or c in ".-_" else "-" for c in label).strip(".") or "method"


def _executed(training: LocalTraining | None, entry: Entry | None, data: FederatedData) -> LocalTraining | None:
    """With the settings of the entry's own."""
    if entry is None or not entry.settings:
        return training
    known = RunConfig.described()
    base = training or LocalTraining(augmentation=data.own_augmentation)
    return replace(base, **{known[key].name: value for key, value in entry.settings})
