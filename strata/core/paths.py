"""Paths as users write them. Without torch: a fleet's devices read their settings before they load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from strata.core.errors import BadInput


def expanded(path: str | Path) -> Path:
    """`~/data` and `~bob/data` with the home folder in place."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or nobody knows where the home is
        raise BadInput(
            f"{path} begins with a home folder that is not known here: give the whole path, such as /home/bob/data"
        ) from None


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turns what the operating system says about a folder or file that the user named into a sentence."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write to {path} ({error.strerror or error}): choose a folder that can be written to"
        ) from error
