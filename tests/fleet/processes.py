"""The real commands as processes, each ended by its own process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from strata.fleet.environment import environment

PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
STRATA = (sys.executable, "-m", "strata")
PATIENCE = 180.0  # seconds; the machine may be very busy


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


DEVICE = Path(__file__).parents[2] / "device"


def thin_device(before: str = "") -> tuple[str, ...]:
    """`strata-device` from this tree, after some Python of the caller's."""
    code = f"import sys; sys.path.insert(0, {str(DEVICE)!r}); from strata_device import cli, device; {before}"
    return sys.executable, "-c", f"{code}sys.exit(cli.main())"


def memory_of(pid: int, key: str = "VmHWM", file: str = "status") -> int:
    """Bytes, by a line of /proc."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


class Command:
    """`strata ...`, or another program, with its output in a file."""

    def __init__(self, folder: Path, *arguments: str, program: Sequence[str] = STRATA) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / f"{time.monotonic_ns()}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*program, *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                env={**environment(folder / "flower"), "OMP_NUM_THREADS": "1", "PATH": PATH},
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text():
            if self.process.poll() is not None and text not in self.text():
                raise AssertionError(f"ended with {self.process.returncode} before {text!r}:\n{self.text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} in {seconds} s:\n{self.text()}")
            time.sleep(0.1)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Commands:
    """Those that are ended with the `with`, the last one first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ending = folder, ExitStack()

    def __enter__(self) -> Callable[..., Command]:
        return self._started

    def __exit__(self, *reason: object) -> None:
        self.ending.close()

    def _started(self, *arguments: str, program: Sequence[str] = STRATA) -> Command:
        made = Command(self.folder, *arguments, program=program)
        self.ending.callback(made.stop)
        return made


def strata(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata", *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE
    )


def descendants(pid: int) -> list[int]:
    """All processes below this one (Linux)."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Sequence[int], seconds: float = 60.0) -> list[int]:
    """Those that are still there at the end."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
