"""Files that are mapped or replaced whole."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata_device.errors import BadInput


def mapped(path: Path) -> memoryview:
    """Read-only, its pages the kernel's to take back; an empty file is an empty view."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_whole(path: Path, parts: Iterable[Any]) -> None:
    """In place of what is there, or not at all."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        for part in parts:
            file.write(part)
    new.replace(path)


@contextmanager
def locked(path: Path, otherwise: str) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(otherwise) from None
        yield
