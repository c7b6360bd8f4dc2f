"""Processes: those we start and end, those we end with, and the signals that end us. No torch here: a fleet's devices
use this before they load it, and some processes live for one message only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from strata.core.files import open_to_append

GRACE = 15.0  # seconds between asking a process to end and ending it
LAUNCHER = "STRATA_LAUNCHER"  # in the environment of what `start` starts: the launcher's process id
PR_SET_PDEATHSIG = 1


# --- signals ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handlers_kept(*numbers: int) -> Iterator[bool]:
    """Afterwards these signals go where they go now, whoever takes them in the meantime. False: this is not the main
    thread, which alone can take them."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield True
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by something other than Python, which cannot put it back
                signal.signal(number, handler)


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Where a command has nothing to tidy up, it ends as by any Ctrl-C: 130, without a traceback."""


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise Stopped once; what follows is tidying up and is not interrupted again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    with handlers_kept(*numbers) as can_take:
        if can_take:
            for number in numbers:
                signal.signal(number, stop)
        yield


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as often as it comes."""
    with handlers_kept(signal.SIGTERM) as can_take:
        if can_take:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield


class Interrupts:
    """Ctrl-C and SIGTERM stop a run between two system calls of nothing important, never inside a checkpoint: they
    raise KeyboardInterrupt only inside `with allowed()`, and one that comes elsewhere waits for the next such place."""

    def __init__(self) -> None:
        self._allowed = False
        self.pending = False
        self._taken = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        numbers = (signal.SIGINT, signal.SIGTERM)
        if self._taken.enter_context(handlers_kept(*numbers)):
            for number in numbers:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._taken.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if self._allowed:
            self._allowed = False  # what follows is tidying up: not interrupted again
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True  # first: a signal between these two lines must not be missed
        try:
            if self.pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False


# --- ending with another process -------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """This process ends when `parent`'s thread that forked it does, also in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        watch_parent(parent)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def watch_parent(parent: int, then: Callable[[], None] = lambda: os._exit(1)) -> None:
    """The same within a second, whichever of the parent's threads did it; or something else than an end at once."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        then()

    threading.Thread(target=watch, daemon=True).start()


def end_with_launcher() -> None:
    """Called in a process that `start` started: it ends when its launcher is gone, however that came about."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if launcher:
        watch_parent(launcher, then=_end_group)


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGTERM)  # ours alone: `start` made this process the leader of a group
    time.sleep(GRACE)
    os._exit(1)


# --- processes that we start -----------------------------------------------------------------------------------------


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Its output in a file, and in a session of its own: Ctrl-C at the terminal reaches us alone, and we decide."""
    with open_to_append(log) as output:
        return subprocess.Popen(
            command,
            env={**environment, LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Asked first; then whatever is left of the processes it had started."""
    end_or_kill(process, GRACE, ask=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)


def end_or_kill(process: subprocess.Popen[bytes] | subprocess.Popen[str], seconds: float, ask: bool = False) -> None:
    """Waits so long for it to end by itself (or, with `ask`, because it is asked to); then ends it."""
    if process.poll() is not None:
        return
    if ask:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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


# --- what /proc says of a process ------------------------------------------------------------------------------------


def parent_of(pid: int) -> int | None:
    """None where there is no such process, or no /proc to say so."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def status_bytes(key: str, pid: int | None = None) -> int:
    """VmRSS, VmData, ... of this process or another. OSError where they cannot be read."""
    path = Path(f"/proc/{'self' if pid is None else pid}/status")
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {key}")
