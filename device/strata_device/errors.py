"""How a command ends without a result, and what the server is told of an error: its kind, never its words."""

from __future__ import annotations

from typing import Any

# of strata/fleet/protocol/failures.py, where the server has a sentence for each
KINDS = frozenset({"memory", "late", "unready", "refused", "failed", "program"})


class BadInput(Exception):
    """One clear sentence: what was wrong and what would be right. Exit code 2."""


class Unreachable(BadInput):
    """Nobody answers there now; perhaps later."""


class Refused(Exception):
    """What came from the server is not done: the reason, for this device's own log."""


class CannotRun(Refused):
    """A step program that this device cannot run."""


class OutOfMemory(Exception):
    """The work needs more than the device's budget."""


def one_line(error: object, limit: int = 500) -> str:
    said = " ".join(str(error).split())
    return said[:limit] or type(error).__name__


def kind_of(error: BaseException) -> str:
    kinds: list[tuple[type[BaseException] | tuple[Any, ...], str]] = [
        ((OutOfMemory, MemoryError), "memory"),
        (CannotRun, "program"),
        (Refused, "refused"),
        (BadInput, "unready"),
    ]
    return next((kind for classes, kind in kinds if isinstance(error, classes)), "failed")
