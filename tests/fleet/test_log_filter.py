"""What is shown of the server app's output."""

from __future__ import annotations

import pytest

from strata.core.files import StorageFailed
from strata.fleet.log_filter import Words
from strata.planning.infeasible import PlanInfeasible

TRACE = """\x1b[91mERROR\x1b[0m:     ServerApp raised an exception
Traceback (most recent call last):
  File "conducting.py", line 1, in conduct
    raise X
{}
"""


def test_flowers_own_lines_are_left_out_also_in_pieces() -> None:
    shown: list[str] = []
    words = Words(shown.append)
    words.hear("\x1b[92mINFO \x1b[0m:      Start `flwr")
    words.hear("-serverapp` process\na is here\nSuccessfully installed strata to /x\nround 1")
    assert shown == ["a is here\n"]
    words.end()
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
    words = Words(shown.append)
    words.hear("before\n" + TRACE.format(last))
    assert words.end() == code and shown == ["before\n"]


def test_a_bug_shows_its_traceback() -> None:
    shown: list[str] = []
    words = Words(shown.append)
    words.hear(TRACE.format("KeyError: 'x'"))
    assert words.end() == 1
    assert shown[0].startswith("Traceback") and "KeyError: 'x'\n" in shown
