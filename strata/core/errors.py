"""The two ways a command ends without a result (the user asked for something impossible to read, or to fit), and an
error of anybody else's in one line."""

from __future__ import annotations


class BadInput(Exception):
    """One clear sentence: what was wrong and what would be right. Exit code 2."""


class Infeasible(Exception):
    """No configuration fits the budget. Exit code 3."""


class TooLittle(Infeasible):
    """The same, where it is known what would do: `need` bytes, for `what`."""

    def __init__(self, message: str, need: int, what: str) -> None:
        super().__init__(message)
        self.need, self.what = need, what


def one_line(error: object, limit: int = 500, kind: bool = False) -> str:
    """What an error, or another program, says: on one line, cut at `limit`. `kind`: after the name of its class, as in
    `ValueError: what it says`. Without words the name is all there is."""
    said = " ".join(str(error).split())
    name = type(error).__name__
    if not said:
        return name
    return f"{name}: {said}"[:limit] if kind else said[:limit]
