"""What a device was started with, and what a user may write as a size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from strata_device.errors import BadInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
FACTS = "data.json"  # what is known of the data, in the device's folder
MOST_BYTES = 2**63 - 1
FEWEST_BYTES = 1024


class Settings(NamedTuple):
    name: str
    folder: str  # for programs, frozen layers, prepared data and the log
    budget: int | None = None  # bytes for training; None: what the system has left
    data: str = "digits"  # or an .npz, or a folder with one
    classes: int | None = None  # None: as the data says
    part: int = 0
    parts: int = 1  # 1: all of the data is its own
    seed: int = 0  # of the split
    hold_out: float = 0.0
    deadline: float | None = None
    hard_limit: bool = True
    library: str | None = None  # libstrata_step.so; None: where it is looked for

    def check(self) -> Settings:
        if not NAME.fullmatch(self.name):
            raise BadInput(
                f"a device's name is 1 to 64 letters, digits, dots, dashes or underscores, not {self.name!r}"
            )
        if not 0 <= self.part < self.parts:
            raise BadInput(f"a device holds part 0 to {self.parts - 1} of {self.parts}, not {self.part}")
        if not 0 <= self.hold_out < 1:
            raise BadInput(f"hold-out is the share of data kept for evaluation, from 0 to below 1, not {self.hold_out}")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise BadInput(f"the device's deadline is a number of seconds above 0, not {self.deadline}")
        if self.classes is not None and self.classes < 1:
            raise BadInput(f"--classes is the number of classes, at least 1, not {self.classes}")
        return self

    @property
    def place(self) -> Path:
        return Path(self.folder)

    def written(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def read(cls, text: str) -> Settings:
        values: dict[str, Any] = json.loads(text)
        return cls(**values)


def parse_bytes(text: str) -> int:
    """ "24 MiB", "1.5GB" or "24000000", as `strata` takes it."""
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise BadInput(f"a budget is a number of bytes such as '24 MiB', '512MB' or '24000000', not {text!r}")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if 1 <= size < FEWEST_BYTES and match[2] == "":
        raise BadInput(f"{text} bytes? For a budget of {text} MiB say {text}MiB; for so many bytes, {text}B")
    if not 1 <= size <= MOST_BYTES:
        raise BadInput(f"a budget must be at least one byte and below 2^63 bytes, not {text[:40]!r}")
    return math.floor(size)
