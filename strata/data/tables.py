"""A table of numbers, one row for each sample: columns that the model sees, and one to predict."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.float32 import check_float32_holds, check_float64_holds
from strata.data.objective_names import objective_named
from strata.data.objectives import Objective
from strata.data.reading import Reading
from strata.data.rows import SPLIT, Row, labels_of, lines, parts_of, users_of
from strata.data.samples import FederatedData, Samples

INPUT = "x"
WHOLE = re.compile(r"0|-?[1-9][0-9]*")
CODE = re.compile(r"-?0[0-9]+")  # a name of digits: 01 is not 1
REAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)


def load_table(path: Path, reading: Reading, classes: int | None = None) -> FederatedData:
    """A CSV file with a header: numbers in every column but the target's, the users' and `split`."""
    if reading.objective is None:
        raise BadInput(
            f"say what to do with the column {reading.target!r} of {path.name}: --objective classification, or "
            "regression"
        )
    objective = objective_named(reading.objective)
    if objective.name not in ("classification", "regression"):
        raise BadInput(
            f"a table has one column to predict: --objective classification or regression, not {objective.name}"
        )
    header, cells = _cells(path)
    columns = _columns(header, reading, path)
    at = {name: number for number, name in enumerate(header)}
    rows = [
        Row(
            [_number(row[at[name]], f"line {line} of {path}", name) for name in columns],
            _target(row[at[reading.target]], objective, f"line {line} of {path}", reading.target),
            f"line {line} of {path}",
            row[at[SPLIT]] if SPLIT in at else None,
            row[at[reading.user_field]] if reading.user_field else None,
        )
        for line, row in cells
    ]
    if any(isinstance(row.label, str) and CODE.fullmatch(row.label) for row in rows):
        rows = [replace(row, label=str(row.label)) for row in rows]  # codes of digits: all are names, 10 beside 01
    train, test, notes = parts_of(rows, reading, path.name)
    values = [np.array([row.text for row in part], dtype=np.float64) for part in (train, test)]
    if reading.standardise:
        mean, deviation = values[0].mean(0), values[0].std(0)
        values = [(part - mean) / np.where(deviation > 0, deviation, 1.0) for part in values]
    else:
        check_float32_holds(
            np.concatenate(values),
            [f"the column {name!r} of {path.name}" for name in columns],
            "subtract an offset or scale it, leave it out with --columns, or give --standardise",
        )
    inputs = [{INPUT: torch.from_numpy(part.astype(np.float32))} for part in values]
    labels = labels_of(train, test, objective, classes, f"the column {reading.target!r} of {path.name}")
    return FederatedData(
        Samples(inputs[0], labels.train),
        Samples(inputs[1], labels.test),
        path.name,
        labels.classes,
        users_of([row.user for row in train]),
        class_names=labels.names,
        objective=objective,
        notes=notes,
    )


def _cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    text = "".join(line for _, line in lines(path)).removeprefix("\ufeff")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        found = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        raise BadInput(f"line {reader.line_num} of {path} is not CSV: {error}") from None
    if len(set(header)) < len(header) or not all(header):
        raise BadInput(
            f"{path} should begin with a line of column names, each another; it has {', '.join(header)!r:.200}"
        )
    if not found:
        raise BadInput(f"{path} has no rows below its column names")
    for line, row in found:
        if len(row) != len(header):
            raise BadInput(f"line {line} of {path} has {len(row)} cells, and there are {len(header)} columns")
    return header, found


def _columns(header: Sequence[str], reading: Reading, path: Path) -> list[str]:
    used = [reading.target, *([reading.user_field] if reading.user_field else [])]
    for name in (*used, *reading.columns):
        if name not in header:
            raise BadInput(f"{path} has no column {name!r}; it has {', '.join(header)}")
    columns = list(reading.columns) or [name for name in header if name not in (*used, SPLIT)]
    if reading.target in columns or not columns or len(set(columns)) < len(columns):
        raise BadInput(
            f"give in --columns at least one column, each once, and not {reading.target!r}, which is to predict"
        )
    return columns


def _number(cell: str, where: str, column: str) -> float:
    try:
        value = math.nan if "_" in cell else float(cell)  # which Python would leave out of 1_0
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        what = repr(cell) if cell else "nothing"
        raise BadInput(
            f"{where} has {what} in the column {column!r}, and columns are numbers: mend it, or name the columns to "
            "use with --columns"
        )
    if WHOLE.fullmatch(cell):
        check_float64_holds(int(cell), f"{where} in the column {column!r}")
    return value


def _target(cell: str, objective: Objective, where: str, column: str) -> str | int | float:
    if objective.name == "regression":
        return _number(cell, where, column)
    if not cell:
        raise BadInput(f"{where} has nothing in the column {column!r}, which is to predict")
    if WHOLE.fullmatch(cell):
        return int(cell)
    if not REAL.fullmatch(cell) or CODE.fullmatch(cell):
        return cell
    raise BadInput(
        f"{where} has {cell} in the column {column!r}: a class is a name or a whole number, and --objective regression "
        "is for real numbers"
    )
