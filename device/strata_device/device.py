"""The device's one lasting process: asks the server for work, has a child do it, and says that it is still there.

One thread: it keeps the connection, the key and nothing else. Messages go from the connection to a file and answers
from a file to the connection; the child maps them.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_device import __version__, codec, library
from strata_device.addresses import Address, need_loopback
from strata_device.errors import BadInput, Refused, Unreachable, one_line
from strata_device.files import locked, write_whole
from strata_device.keys import DeviceKeys
from strata_device.link import Link, Message, NotAdmitted, Unfinished
from strata_device.memory import memory_left, status_bytes
from strata_device.settings import FACTS, Settings

TASK, ANSWER, LOG = "task.bin", "answer.bin", "device.log"
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between attempts; the last one repeats
REFUSED = 120.0  # seconds: the server takes a device that was killed for online for another minute
STEADY = 60.0  # seconds of connection after which the pauses start anew
FORMAT = 1  # of step programs (programs.py)
LARGEST_HEADER = 4 << 20
LARGEST_LOG = 4 << 20
FAILURE = 2
START = "import sys; sys.path[:] = sys.argv.pop().split(chr(10)); from strata_device.worker import main; main()"
# One heap, whose free blocks go back to the kernel; one thread
CHILD = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
         "OMP_NUM_THREADS": "1"}  # fmt: skip

Say = Callable[[str], None]


class Stopped(BaseException):
    """Ctrl-C or SIGTERM."""


class Device:
    def __init__(self, settings: Settings, keys: DeviceKeys | None, say: Say) -> None:
        self._settings, self._say, self._keys = settings, say, keys
        self._folder = settings.place
        self._log = self._folder / LOG
        self._child: int | None = None
        self._baseline = self._prepared()
        self._budget = settings.budget or max(1 << 20, memory_left() - self._baseline)

    def _prepared(self) -> int:
        """Bytes that a child holds before it has work. The data is ready afterwards."""
        library.find(self._settings.library)
        out = self._folder / "prepared"
        code = self._run("prepare", None, None, out)
        if code == 0:
            return int(out.read_text() or 0)
        said = _last_line(self._log)
        raise BadInput(said if code == FAILURE else f"the device's data cannot be made ready: see {self._log}")

    # --- a connection's life -----------------------------------------------------------------------------------

    def serve(self, link: Link, poll: float) -> None:
        """For ever: until an exception says that the connection has ended, or somebody wants the device to."""
        while True:
            link.beat()
            asked = link.next_message()
            if asked is None:
                time.sleep(min(poll, max(0.01, link.until_beat())))
                continue
            began = time.monotonic()
            try:
                self._take(link, asked)
                link.reply(asked, self._folder / ANSWER, time.monotonic() - began)
            except Unfinished as error:
                self._write(f"a message was given up: {error}")
            finally:
                for name in (TASK, ANSWER):
                    (self._folder / name).unlink(missing_ok=True)

    def _take(self, link: Link, asked: Message) -> None:
        """Leaves the answer in its file."""
        try:
            link.fetch(asked, self._folder / TASK)
            link.confirm(asked)
            meta = _peek(self._folder / TASK)
        except Refused as error:
            self._write(f"refused: {one_line(error)}")
            self._answer({"what": "failure", "kind": "refused"})
            return
        if meta.get("what") == "hello":
            self._answer({"token": meta.get("token"), **self._hello()})
            return
        given = [self._settings.deadline, meta.get("deadline")]
        limits = [float(seconds) for seconds in given if isinstance(seconds, int | float)]
        code = self._run("work", link, min(limits, default=None))
        if code is None:
            self._answer({"what": "failure", "kind": "late"})
        elif code != 0:
            killed = code < 0
            self._write(f"the child was ended by signal {-code}: out of memory, most likely" if killed else "failed")
            self._answer({"what": "failure", "kind": "memory" if killed else "failed"})

    def _answer(self, meta: dict[str, Any]) -> None:
        write_whole(self._folder / ANSWER, codec.pieces(meta))

    def _hello(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self._folder / FACTS).read_text())
        return {
            "what": "device",
            "name": self._settings.name,
            "budget": self._budget,
            "baseline": self._baseline + status_bytes("VmRSS"),
            "samples": facts["train"],
            **{key: facts[key] for key in ("held", "classes", "input", "mean", "std", "augmentation", "labels")},
            "structure": "",  # it builds no model: it is given programs
            "native": {"format": FORMAT, "abi": library.ABI},
            "programs": _programs(self._folder),
            "holds": _holds(self._folder),
            "versions": {"strata-device": __version__, "python": platform.python_version()},
        }

    # --- the child ---------------------------------------------------------------------------------------------

    def _run(self, action: str, link: Link | None, deadline: float | None, out: Path | None = None) -> int | None:
        """Its exit code, below 0 for a signal; None where it was ended at its deadline."""
        settings = self._settings
        budget = str(self._budget) if action == "work" and settings.hard_limit else ""
        authority = "" if self._keys is None else str(self._keys.authority)
        paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        arguments = [action, settings.written(), authority, budget, str(os.getpid()), "\n".join(paths)]
        command = [sys.executable, "-S", "-E", "-c", START, *arguments]
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        target = (str(self._log), append, 0o600) if out is None else (str(out), append | os.O_TRUNC, 0o600)
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, *target),
            (os.POSIX_SPAWN_OPEN, 2, str(self._log), append, 0o600),
        ]
        self._child = os.posix_spawn(sys.executable, command, {**os.environ, **CHILD}, file_actions=actions)
        try:
            return self._waited(self._child, link, None if deadline is None else time.monotonic() + deadline)
        finally:
            self._end_child()

    def _waited(self, child: int, link: Link | None, until: float | None) -> int | None:
        ending = os.pidfd_open(child)
        try:
            while True:
                left = [60.0]
                if until is not None:
                    left.append(max(0.0, until - time.monotonic()))
                if link is not None:
                    left.append(link.until_beat())
                if select.select([ending], [], [], min(left))[0]:
                    _, status = os.waitpid(child, 0)
                    self._child = None
                    return os.waitstatus_to_exitcode(status)
                if until is not None and time.monotonic() >= until:
                    return None
                if link is not None:
                    link.beat()
        finally:
            os.close(ending)

    def _end_child(self) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = None

    def _write(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{text}\n")


def work(settings: Settings, server: Address, keys: DeviceKeys | None, *, say: Say, wait: bool, poll: float) -> int:
    """Until Ctrl-C or SIGTERM (0). `wait` False: an unreachable server is an error, not a reason to wait."""
    if keys is None:
        need_loopback(server)
    folder = settings.place
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / LOG
        if log.exists() and log.stat().st_size > LARGEST_LOG:
            log.replace(folder / f"{LOG}.old")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written to ({error.strerror}): give another with --cache") from None
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: Any) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped

    with locked(folder / "lock", f"another process is device {settings.name} already: end it, or give --cache"):
        for one in signals:
            signal.signal(one, stop)
        try:
            link = Link(server, keys)
            device = Device(settings, keys, say)
            _lives(device, link, settings.name, say, wait, poll)
        except Stopped:
            say("stopping")
    return 0


def _lives(device: Device, link: Link, name: str, say: Say, wait: bool, poll: float) -> None:
    """One connection after another."""
    attempt, refused_since, told = 0, None, False
    while True:
        began = time.monotonic()
        connected = False
        try:
            try:
                link.activate()
                connected = True
                say(f"{name} is connected to {link.server}; log: {device._log}")
                device.serve(link, poll)
            finally:
                link.deactivate()
        except Unreachable as error:
            if not wait:
                raise
            if connected or not told:
                say("the connection has ended; connecting again" if connected else f"{error} Trying again")
            refused_since, told = None, True
        except NotAdmitted:
            if not connected:
                refused_since = began if refused_since is None else refused_since
                if not wait or time.monotonic() - refused_since >= REFUSED:
                    raise BadInput(_unknown(name, link.server)) from None
            say("the connection has ended; connecting again" if connected else "not admitted yet; trying again")
        if connected:
            refused_since, told = None, False
            attempt = 0 if time.monotonic() - began > STEADY else attempt
        time.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
        attempt += 1


def _unknown(name: str, server: Address) -> str:
    return (
        f"the server at {server} does not admit this device's key: is registered/{name}.pub in the server's key folder "
        "made together with this device.key, and is this device's clock right?"
    )


def _peek(task: Path) -> dict[str, Any]:
    """What a message says, without its tensors, which the child looks at: none of it is believed further than here."""
    with task.open("rb") as file:
        head = file.read(codec.PREFIX)
        size = int.from_bytes(head[len(codec.MAGIC) :], "little")
        if head[: len(codec.MAGIC)] != codec.MAGIC or size > LARGEST_HEADER:
            raise codec.Malformed("this is not a message of Strata's, or of another version")
        try:
            said = json.loads(file.read(size))
        except (ValueError, RecursionError):
            said = None
    meta = said.get("meta") if isinstance(said, dict) else None
    if not isinstance(meta, dict):
        raise codec.Malformed("the header is not that of a message")
    return meta


def _programs(folder: Path) -> list[str]:
    place = folder / "programs"
    return sorted(path.name for path in place.iterdir() if (path / "step.pte").is_file()) if place.is_dir() else []


def _holds(folder: Path) -> list[str]:
    """The digests of the frozen layers that are here, by their file's header alone."""
    try:
        with (folder / "frozen.bin").open("rb") as file:
            size = int.from_bytes(file.read(codec.PREFIX)[len(codec.MAGIC) :], "little")
            entries = json.loads(file.read(min(size, LARGEST_HEADER)))["tensors"]
        return sorted({str(entry[0]).partition(".")[2] for entry in entries})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return []


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "the device's data cannot be made ready"
