"""A metrics.jsonl that grows: what was read once is not read again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata.runs.metrics import ascending

Parse = Callable[[bytes], Mapping[str, Any] | None]


class GrowingRecords:
    """Rounds 0, 1, 2, ... A last line without an end is being written now; all others are counted.

    `parse`: the record of a line, None: it is none. The file is read from its beginning again where it is another one,
    or no longer has the line that was read last where it was: rounds are removed from it when a run goes back.
    """

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._forget()

    def _forget(self) -> None:
        self.lines = 0
        self._found: list[Mapping[str, Any]] = []  # in the order of the file
        self._ascends = True
        self._file = 0
        self._end = 0  # bytes that were read
        self._last = b""  # the latest line of them

    def update(self, path: Path) -> None:
        with path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            file.seek(max(0, self._end - len(self._last)))
            if number != self._file or file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            self._file = number
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(line)

    def _take(self, line: bytes) -> None:
        self._end += len(line)
        self._last = line
        self.lines += 1
        record = self._parse(line)
        if record is not None:
            self._ascends &= not self._found or self._found[-1]["round"] < record["round"]
            self._found.append(record)

    def records(self) -> list[Mapping[str, Any]]:
        """With ascending rounds; a wrong number costs its own line."""
        if self._ascends:
            return self._found
        return [self._found[at] for at in ascending([int(record["round"]) for record in self._found])]


def line_of(line: bytes) -> Any:
    """Whatever JSON it is; None where it is none."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
