"""`pytest --processes 4`: tests are collected once, and forked processes take them, one file after the other.

pytest-xdist's processes each import and collect everything, which for this suite takes longer than many of its files.
Warnings that tests give are not listed at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from strata.core.processes import die_with_parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run files of tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("processes")
    if count < 2 or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop, or its word on what could not be collected
    groups = [list(items) for _, items in groupby(session.items, key=_group)]
    taken = multiprocessing.Value("i", 0)
    children = [_start(session, groups, taken) for _ in range(min(count, len(groups)))]
    try:
        while waiting := [child for child in children if not child.has_ended]:
            for ready in wait([child.pipe for child in waiting]):
                child = next(one for one in waiting if one.pipe is ready)
                for report in child.reports(session):
                    session.config.hook.pytest_runtest_logreport(report=report)
            if session.shouldfail or session.shouldstop:
                taken.value = len(groups)
    finally:
        for child in children:
            child.pipe.close()
            os.waitpid(child.pid, 0)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _group(item: pytest.Item) -> str:
    """Which tests stay in one process: a file's; or those of files that say so (see conftest.py)."""
    return getattr(item, "forked_with", item.path.as_posix())


@dataclass
class Child:
    pid: int
    pipe: Connection
    group: list[pytest.Item] = field(default_factory=list)  # what is left of the file that it is at
    running: pytest.Item | None = None
    has_ended: bool = False

    def reports(self, session: pytest.Session) -> Iterator[pytest.TestReport]:
        """What it has to say now: one report or none; if it has died, that of the test it died of."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.has_ended = True
            yield from self._lost()
            return
        if kind == "report":
            yield session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
        elif kind == "group":
            self.group = [session.items[index] for index in value]
        elif kind == "item":
            self.running = session.items[value]
            self.group.remove(self.running)
        elif kind == "end":
            self.has_ended = True

    def _lost(self) -> Iterator[pytest.TestReport]:
        for item, what in [(self.running, "its process died"), *((item, "not run: see above") for item in self.group)]:
            if item is not None:
                yield pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")


def _start(session: pytest.Session, groups: Sequence[list[pytest.Item]], taken: Any) -> Child:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, ours)
    code = 1
    try:
        die_with_parent(parent)
        ours.close()
        _work(session, groups, taken, theirs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Sender:
    """Reports go to the parent."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", data))


def _work(session: pytest.Session, groups: Sequence[list[pytest.Item]], taken: Any, pipe: Connection) -> None:
    config = session.config
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter._tw._file = open(os.devnull, "w")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # what it captures into would be shared with the other processes
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(Sender(config, pipe))
    places = {item: index for index, item in enumerate(session.items)}
    group = _next(groups, taken)
    while group is not None:
        pipe.send(("group", [places[item] for item in group]))
        following = None
        for item, after in zip(group, [*group[1:], None], strict=True):
            if after is None:  # fixtures are kept for the next file as for the next test
                following = _next(groups, taken)
                after = following[0] if following else None
            pipe.send(("item", places[item]))
            config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail or session.shouldstop:
                following = None
                break
        group = following
    pipe.send(("end", None))


def _next(groups: Sequence[list[pytest.Item]], taken: Any) -> list[pytest.Item] | None:
    with taken.get_lock():
        index = taken.value
        taken.value += 1
    return groups[index] if index < len(groups) else None
