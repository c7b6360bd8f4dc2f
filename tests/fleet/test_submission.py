"""`strata fleet run` follows its run through breaks of the connection, and knows when there is nothing to wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from strata.core.errors import BadInput
from strata.fleet.security.addresses import Unreachable, parse_address
from strata.fleet.server import submission as submitting
from strata.fleet.server.control import Access, Refused

pytest.importorskip("flwr")

ACCESS = Access(parse_address("localhost:1"), None, None)


class Stream(list[Any]):
    def close(self) -> None:
        pass


class Client:
    """`logs` and `runs` answer StreamLogs and ListRuns."""

    def __init__(self, logs: Callable[[], Any], runs: Callable[[], str]) -> None:
        self._logs, self._runs = logs, runs

    def StreamLogs(self, request: Any) -> Any:
        return self._logs()

    def ListRuns(self, request: Any) -> Any:
        status = SimpleNamespace(status=self._runs(), sub_status="completed", details="")
        return SimpleNamespace(run_dict={7: SimpleNamespace(status=status)})


def broken(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def follow(monkeypatch: pytest.MonkeyPatch, *visits: Client | Exception) -> tuple[submitting.Ending, list[str]]:
    """What comes of these visits to the server, one after the other; the last one is repeated."""
    left = list(visits)

    @contextlib.contextmanager
    def connect(access: Access) -> Iterator[Any]:
        visit = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(visit, Exception):
            raise visit
        yield visit

    clock = iter(range(0, 10**6, 30))  # half a minute passes with each look at it
    monkeypatch.setattr(submitting, "connect", connect)
    monkeypatch.setattr(submitting, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    said: list[str] = []
    return submitting._follow(ACCESS, 7, lambda _: None, said.append), said


def test_a_break_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, said = follow(monkeypatch, Unreachable("nobody"), Client(Stream, lambda: "finished"))
    assert ending.status == "completed" and said == ["nobody; waiting for it", "the server is back"]


@pytest.mark.parametrize("status, words", [(404, "no longer knows it"), (401, "refused this operator.token")])
def test_a_server_that_does_not_know_the_run_or_us_is_not_waited_for(
    status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without --data-dir that was started again: it listens, and knows of no run."""
    refuse = broken(Refused("refused this operator.token", status))
    ending, said = follow(monkeypatch, Unreachable("nobody"), Client(refuse, refuse))
    assert ending.status == "lost" and words in ending.details and ending.code == 1
    assert said == ["nobody; waiting for it"]


def test_a_server_that_listens_and_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = broken(BadInput("the server answered 500"))
    ending, said = follow(monkeypatch, Client(fail, fail))
    assert ending.status == "lost" and "has not answered for 120 s" in ending.details
    assert said == ["the server answered 500"]
