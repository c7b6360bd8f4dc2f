"""Processes that we start: their output in a file, their end when we end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from strata.core.errors import BadInput
from strata.core.paths import writing_to

GRACE = 15.0  # seconds between asking a process to end and ending it
LAUNCHER = "STRATA_LAUNCHER"  # the launcher's process id


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Where a command has nothing to tidy up, it ends as by any Ctrl-C: 130, without a traceback."""


class Signals:
    """Ctrl-C and SIGTERM raise Stopped once; what follows is tidying up and is not interrupted again."""

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C at the terminal reaches us alone, and we decide."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**environment, LAUNCHER: str(os.getpid())}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Asked first; then whatever is left of the processes it had started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)


def end_with_launcher() -> None:
    """Called in a started process: it ends when its launcher is gone, however that came about."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if launcher:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGTERM)  # ours alone: `start` made this process the leader of a group
    time.sleep(GRACE)
    os._exit(1)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it became true before the process ended or the time was up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return condition()
        time.sleep(0.1)
    return False


def last_lines(log: Path, count: int = 12, since: int = 0) -> str:
    """The end of a log, for a message about a process that failed."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            lines = file.read()[-20_000:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])


@contextlib.contextmanager
def locked(folder: Path, otherwise: str) -> Iterator[None]:
    """One process at a time; the lock goes with its process."""
    with writing_to(folder):
        lock = (folder / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(otherwise) from None
        yield
