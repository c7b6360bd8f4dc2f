"""Rows of a file: text and labels as JSON, a line each; which of them train and which test, and whose they are."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.core.errors import BadInput, one_line
from strata.data.float32 import check_float32_holds, check_float64_holds
from strata.data.objectives import Objective, classes_seen
from strata.data.reading import Reading

SPLIT = "split"
UNUSED = ("validation", "valid", "val", "dev")  # splits that are neither trained nor tested on
_SEED = 0x7E57  # of the rows that are held out: the same whatever the run's seed


@dataclass(frozen=True)
class Row:
    """`text`: a string, or with a label for each, a list of words. `where`: for sentences."""

    text: Any
    label: Any
    where: str
    split: str | None = None
    user: str | None = None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, which may be packed (.xz, .gz), with their numbers from 1."""
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start} of what was read): save it as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, a line each, with where they stand."""
    for number, line in lines(path):
        if number == 1:
            line = line.removeprefix("\ufeff")  # a mark of the byte order, as in tables
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput(f"line {number} of {path} is not JSON: each line should be one object") from None
        if not isinstance(found, dict):
            raise BadInput(f'line {number} of {path} is not an object such as {{"text": …, "label": …}}')
        yield f"line {number} of {path}", found


def stored_objects(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a data set that Hugging Face's `datasets` saved there (save_to_disk), with the names of classes; of
    one with parts, each row has its part as its split."""
    try:
        import datasets
    except ImportError:
        raise BadInput(
            f"{folder} is a folder: to read a data set of Hugging Face's from it, install the package datasets; else "
            "give a file of JSON lines"
        ) from None
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise BadInput(f"{folder} holds no data set that datasets has saved: {one_line(error, 200)}") from error
    parts = dict(found) if isinstance(found, dict) else {None: found}
    for part, rows in parts.items():
        named = {key: one.int2str for key, one in rows.features.items() if hasattr(one, "int2str")}
        for number, row in enumerate(rows):
            one = {key: named[key](value) if key in named and value >= 0 else value for key, value in row.items()}
            of_part = "" if part is None else f" of {part}"
            yield f"row {number}{of_part} in {folder}", one if part is None else {**one, SPLIT: part}


def text_rows(path: Path, reading: Reading, labelled: bool) -> list[Row]:
    """`labelled` False: labels are not looked at."""
    rows = []
    for where, one in stored_objects(path) if path.is_dir() else objects(path):
        wanted = [reading.text_field, *([reading.target] if labelled else [])]
        wanted += [reading.user_field] if reading.user_field else []
        for key in wanted:
            if key not in one:
                raise BadInput(f"{where} has no field {key!r}; it has {', '.join(map(repr, one)) or 'none'}")
        split = one.get(SPLIT)
        user = None if reading.user_field is None else str(one[reading.user_field])
        rows.append(Row(one[reading.text_field], one[reading.target] if labelled else None, where, split, user))
    if not rows:
        raise BadInput(f"{path} has no rows")
    return rows


def parts_of(rows: Sequence[Row], reading: Reading, name: str) -> tuple[list[Row], list[Row], tuple[str, ...]]:
    """Rows to train and to test on, as their split says, or else a share drawn by lot; and what there is to say."""
    if all(row.split is None for row in rows):
        count = round(reading.share * len(rows))
        if not 0 < count < len(rows):
            raise BadInput(
                f"{name} has {len(rows)} rows, and a test share of {reading.share} takes {count}: give another "
                "--test-share, or a field split with train and test"
            )
        chosen = set(np.random.default_rng(_SEED).permutation(len(rows))[:count].tolist())
        parts = {True: [row for number, row in enumerate(rows) if number in chosen]}
        return [row for number, row in enumerate(rows) if number not in chosen], parts[True], ()
    if reading.test_share is not None:
        raise BadInput(f"the rows of {name} say themselves which are to test on ({SPLIT}): leave out --test-share")
    for row in rows:
        if row.split not in ("train", "test", *UNUSED):
            raise BadInput(f"{row.where} has the split {row.split!r}; it should be train, test or {UNUSED[0]}")
    train, test = ([row for row in rows if row.split == part] for part in ("train", "test"))
    if not train or not test:
        raise BadInput(f"{name} has {len(train)} rows of the split train and {len(test)} of test: give some of both")
    unused = len(rows) - len(train) - len(test)
    return train, test, (f"{name}: {unused} rows of a validation split are left out",) if unused else ()


def users_of(rows: Sequence[str | None]) -> list[np.ndarray] | None:
    """Sample indices per user, by name; None where there are no users."""
    if not rows or rows[0] is None:
        return None
    names = np.array(rows)
    return [np.flatnonzero(names == user) for user in np.unique(names)]


@dataclass(frozen=True)
class Labels:
    """Targets of both parts, how many outputs they need, and the classes' names where they have any."""

    train: Tensor
    test: Tensor
    classes: int
    names: tuple[str, ...] = ()


def labels_of(
    train: Sequence[Row], test: Sequence[Row], objective: Objective, classes: int | None, what: str
) -> Labels:
    """What rows are labelled with, as the objective has it: nothing is converted but names of classes to numbers.
    `what`: they are in, for sentences."""
    kind = objective.name
    if kind == "regression":
        return _numbers(train, test, what)
    if kind == "multi-label":
        return _several(train, test)
    names, numbers = classes_of([row.label for row in (*train, *test)], [row.where for row in (*train, *test)], classes)
    targets = torch.tensor(numbers)
    count = len(names) or classes or classes_of_numbers(targets, what)
    return Labels(targets[: len(train)], targets[len(train) :], count, names)


def classes_of(labels: Sequence[Any], where: Sequence[str], classes: int | None) -> tuple[tuple[str, ...], list[int]]:
    """Names in alphabetical order, and the number of each label among them. Whole numbers are classes as they are, and
    have no names."""
    kind = type(labels[0])
    if kind not in (str, int):
        raise BadInput(
            f"{where[0]} has the label {labels[0]!r}; a class is a name or a whole number, and --objective regression "
            "is for real numbers, multi-label for lists"
        )
    for label, place in zip(labels, where, strict=True):
        if type(label) is not kind:
            raise BadInput(
                f"{place} has the label {label!r} and {where[0]} {labels[0]!r}: give names to all classes, or whole "
                "numbers"
            )
        if kind is int and not 0 <= label < (classes or 1 << 31):
            limit = f"within 0 to {classes - 1}" if classes else "from 0 on"
            raise BadInput(f"{place} has the label {label}; classes that are numbers should be {limit}")
    if kind is int:
        return (), list(labels)
    names = tuple(sorted(set(labels)))
    known = {name: number for number, name in enumerate(names)}
    return names, [known[label] for label in labels]


def classes_of_numbers(numbers: Tensor, what: str) -> int:
    try:
        return classes_seen(numbers, "--classes ")
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None


def _numbers(train: Sequence[Row], test: Sequence[Row], what: str) -> Labels:
    for row in (*train, *test):
        values = row.label if isinstance(row.label, list) and row.label else [row.label]
        if not all(type(value) in (int, float) for value in values):
            raise BadInput(f"{row.where} has the label {row.label!r:.80}; regression needs a number, or a list of them")
        first = train[0].label
        if isinstance(row.label, list) != isinstance(first, list) or (
            isinstance(first, list) and len(row.label) != len(first)
        ):
            raise BadInput(
                f"{row.where} and {train[0].where} have other counts of numbers to predict: give all the same"
            )
        for value in values:
            check_float64_holds(value, f"{row.where} as its label")
    exact = np.array([row.label for row in (*train, *test)], dtype=np.float64).reshape(len(train) + len(test), -1)
    names = [what] if exact.shape[1] == 1 else [f"number {1 + at} of {what}" for at in range(exact.shape[1])]
    check_float32_holds(exact, names, "subtract an offset, or scale it")
    parts = [torch.tensor([row.label for row in part], dtype=torch.float32) for part in (train, test)]
    return Labels(parts[0], parts[1], parts[0].shape[1] if parts[0].dim() == 2 else 1)


def _several(train: Sequence[Row], test: Sequence[Row]) -> Labels:
    for row in (*train, *test):
        if not isinstance(row.label, list) or not all(isinstance(name, str) for name in row.label):
            raise BadInput(
                f"{row.where} has the label {row.label!r:.80}; several labels are a list of names, maybe empty"
            )
        if len(set(row.label)) < len(row.label):
            raise BadInput(f"{row.where} has a label twice: {row.label!r:.80}")
    names = tuple(sorted({name for row in (*train, *test) for name in row.label}))
    if not names:
        raise BadInput("no row has a label: there is nothing to learn")
    parts = [torch.tensor([[name in row.label for name in names] for row in part]) for part in (train, test)]
    return Labels(parts[0], parts[1], len(names), names)
