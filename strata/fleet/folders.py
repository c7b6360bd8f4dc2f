"""Folders that the user names. federation/files says the same and more, but brings torch into small processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from strata.errors import BadInput


@contextlib.contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Turns what the operating system says about `path` into a sentence."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write to {path} ({error.strerror or error}): choose a folder that can be written to"
        ) from error
