"""metrics.jsonl: one line a round. A disk may damage a line; the others are worth as much as before."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput

NAME = "metrics.jsonl"
METRIC_KEYS = (
    "round", "step", "lr", "train_loss", "accuracy", "upload_bytes", "download_bytes", "train_flops", "peak_bytes",
    "devices", "dropped", "seconds",
)  # fmt: skip
EPSILON = "epsilon"  # one key more under differential privacy
FURTHER = "metrics"  # what the objective says beside its score, where it is not plain classification
VALIDATION = "validation_accuracy"  # and where a callback judges by a validation split
PARTIAL = "partial"  # a key of summary.json, where lines were lost: what follows is of the rounds that are left
SUMS = ("upload_bytes", "download_bytes", "train_flops", "peak_bytes", "dropped", "seconds")  # of summary.json
_AMOUNTS = ("upload_bytes", "download_bytes", "train_flops", "peak_bytes", "seconds")


@dataclass(frozen=True)
class Line:
    """A readable one: its round, and its bytes with their line break."""

    record: dict[str, Any]
    content: bytes

    @property
    def round(self) -> int:
        return int(self.record["round"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run folder; a last line that was cut off is left out, a damaged one is refused."""
    file = path / NAME
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from error
    lines, damaged = readable(content)
    if damaged:
        raise BadInput(f"{file} is damaged: {damaged} of its lines cannot be read, {len(lines)} can")
    return [line.record for line in lines]


def readable(content: bytes) -> tuple[list[Line], int]:
    """The lines that are whole, rounds ascending, and how many others there are. What comes after the last line break
    was being written when the process ended: it is no damage."""
    *ended, rest = content.split(b"\n")
    found = [_parsed(text) for text in ended]
    whole = [line for line in found if line is not None]
    last = _parsed(rest)  # whole, but for its line break
    if last is not None:
        whole.append(last)
    ordered = [whole[at] for at in ascending([line.round for line in whole])]
    return ordered, len(found) + (last is not None) - len(ordered)


def _parsed(text: bytes) -> Line | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(key in record for key in METRIC_KEYS):
        return None
    lists = all(isinstance(record[key], list) for key in ("devices", "dropped"))
    if not lists or type(record["round"]) is not int or not all(_amount(record[key]) for key in _AMOUNTS):
        return None
    return Line(record, text + b"\n")


def _amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def ascending(rounds: Sequence[int]) -> list[int]:
    """Where the most rounds stand that ascend: one wrong number costs its own line, not those that follow."""
    ends: list[int] = []  # of the best chain of each length: where its last round stands
    lasts: list[int] = []  # and that round
    before: list[int] = []  # of each round: where the one before it in its chain stands
    for at, round in enumerate(rounds):
        place = bisect_left(lasts, round)
        before.append(ends[place - 1] if place else -1)
        ends[place : place + 1] = [at]
        lasts[place : place + 1] = [round]
    chain = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(at)
        at = before[at]
    return chain[::-1]
