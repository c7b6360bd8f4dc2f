"""The server app's output as a user wants it: without Flower's lines about itself, and without a traceback for what
one sentence says better."""

from __future__ import annotations

import re
from collections.abc import Callable

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
THEIRS = re.compile(r"(INFO|DEBUG)\s*:|Successfully installed strata ")
FAILURE = re.compile(r"ERROR\s*:\s+ServerApp raised an exception")
PREFIX = "ServerApp failed with exception: "
# how a run ends that the user, not a bug, brought about; and the command's exit code then
EXPECTED = {
    "strata.core.errors.BadInput": 2,
    "strata.core.files.StorageFailed": 2,
    "strata.core.errors.Infeasible": 3,
    "strata.planning.infeasible.PlanInfeasible": 3,
}
FAILED = ("strata.federation.rounds.RoundFailed", "strata.engines.base.EngineFailed")


class LogFilter:
    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = ""  # a line that has not ended yet
        self._trace: list[str] | None = None

    def feed(self, text: str) -> None:
        *lines, self._rest = (self._rest + COLOUR.sub("", text)).split("\n")
        for line in lines:
            self._line(line)

    def end(self) -> int:
        """The exit code of a run that failed. A traceback is shown only now, and only where it tells something."""
        if self._rest:
            self._line(self._rest)
        if self._trace is None:
            return 1
        kinds = [line.partition(":")[0] for line in self._trace if line and not line.startswith(" ")]
        for kind in reversed(kinds):
            if kind in EXPECTED:
                return EXPECTED[kind]
            if kind in FAILED:
                return 1
        for line in self._trace:
            self._show(f"{line}\n")
        return 1

    def _line(self, line: str) -> None:
        if FAILURE.match(line):
            self._trace = []
        elif self._trace is not None:
            self._trace.append(line)
        elif not THEIRS.match(line):
            self._show(f"{line}\n")
