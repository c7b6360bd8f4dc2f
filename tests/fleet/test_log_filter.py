"""What is shown of the server app's output."""

from __future__ import annotations

import pytest

from strata.core.files import StorageFailed
from strata.fleet.log_filter import LogFilter
from strata.planning.infeasible import PlanInfeasible

TRACE = """\x1b[91mERROR\x1b[0m:     ServerApp raised an exception
Traceback (most recent call last):
  File "run.py", line 1, in run_on_fleet
    raise X
{}
"""


def test_flowers_own_lines_are_left_out_also_in_pieces() -> None:
    shown: list[str] = []
    log = LogFilter(shown.append)
    log.feed("\x1b[92mINFO \x1b[0m:      Start `flwr")
    log.feed("-serverapp` process\na is here\nSuccessfully installed strata to /x\nround 1")
    assert shown == ["a is here\n"]
    log.end()
    assert shown == ["a is here\n", "round 1\n"]


@pytest.mark.parametrize(
    "last, code",
    [
        ("strata.core.errors.BadInput: 0 of 9 devices were there", 2),
        ("strata.core.errors.Infeasible: no plan fits\nTwo lines", 3),
        ("strata.federation.rounds.RoundFailed: ten attempts", 1),
        (f"{PlanInfeasible.__module__}.{PlanInfeasible.__qualname__}: no scale fits\n  step 3", 3),
        (f"{StorageFailed.__module__}.{StorageFailed.__qualname__}: no space left", 2),
    ],
)
def test_what_a_sentence_says_needs_no_traceback(last: str, code: int) -> None:
    shown: list[str] = []
    log = LogFilter(shown.append)
    log.feed("before\n" + TRACE.format(last))
    assert log.end() == code and shown == ["before\n"]


def test_a_bug_shows_its_traceback() -> None:
    shown: list[str] = []
    log = LogFilter(shown.append)
    log.feed(TRACE.format("KeyError: 'x'"))
    assert log.end() == 1
    assert shown[0].startswith("Traceback") and "KeyError: 'x'\n" in shown
