"""Paths as users write them. Without torch: a fleet's devices read their settings before they load it."""

from __future__ import annotations

from pathlib import Path

from strata.errors import BadInput


def expanded(path: str | Path) -> Path:
    """`~/data` and `~bob/data` with the home folder in place."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or nobody knows where the home is
        raise BadInput(
            f"{path} begins with a home folder that is not known here: give the whole path, such as /home/bob/data"
        ) from None
