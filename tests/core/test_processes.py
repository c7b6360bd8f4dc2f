"""Signals go back to whom they belonged; processes end with those that started them; none of it needs torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.core.processes import (
    Interrupts,
    Stopped,
    end,
    end_or_kill,
    handlers_kept,
    last_lines,
    parent_of,
    sigterm_as_ctrl_c,
    start,
    status_bytes,
    stopped_by_signals,
    wait_until,
)

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


def test_handlers_are_put_back() -> None:
    before = handlers()
    with pytest.raises(KeyError), handlers_kept(*NUMBERS) as can_take:
        assert can_take
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyError
    assert handlers() == before


def test_in_other_threads_signals_are_left_alone() -> None:
    seen: list[Any] = []

    def work() -> None:
        with handlers_kept(signal.SIGTERM) as can_take, stopped_by_signals(), sigterm_as_ctrl_c(), Interrupts():
            seen.append((can_take, handlers()))

    before = handlers()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [(False, before)] and handlers() == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_command_is_stopped_once(number: signal.Signals) -> None:
    before = handlers()
    with pytest.raises(Stopped), stopped_by_signals():
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            for again in NUMBERS:  # what follows is tidying up
                os.kill(os.getpid(), again)
    assert handlers() == before


def test_sigterm_as_ctrl_c() -> None:
    before = handlers()
    with sigterm_as_ctrl_c():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
    assert handlers() == before


def test_a_run_is_interrupted_where_it_allows_it() -> None:
    before = handlers()
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # nothing happens here
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("what had waited was forgotten")
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("it is still to stop")
    assert handlers() == before


LAUNCHING = """
import sys, os
from pathlib import Path
from strata.core.processes import start
child = start([sys.executable, "-c", sys.argv[1]], os.environ, Path(sys.argv[2]))
print(child.pid, flush=True)
sys.stdin.read()
"""
ENDING_WITH_LAUNCHER = "from strata.core.processes import end_with_launcher; end_with_launcher(); import time; "


def test_a_process_ends_with_its_launcher(tmp_path: Path) -> None:
    code = ENDING_WITH_LAUNCHER + "print('up', flush=True); time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, code, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    child = int(launcher.stdout.readline())
    assert wait_until(lambda: last_lines(tmp_path / "log") == "up", launcher, 60)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    launcher.stdin.close()
    launcher.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_was_started_is_ended_politely_or_not(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = start([sys.executable, "-c", stubborn], dict(os.environ), tmp_path / "log")
    assert wait_until(lambda: last_lines(tmp_path / "log") == "up", process, 60)
    end_or_kill(process, 0.1, ask=True)
    assert process.returncode == -signal.SIGKILL
    end(process)  # harmless twice
    process = start([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), tmp_path / "other")
    end(process)
    assert process.returncode == -signal.SIGTERM
    assert not wait_until(lambda: False, process, 60)  # it has ended: there is nothing to wait for


def test_what_proc_says() -> None:
    assert parent_of(os.getpid()) == os.getppid() and parent_of(2**30) is None
    assert status_bytes("VmRSS") == pytest.approx(status_bytes("VmRSS", os.getpid()), rel=0.1)
    with pytest.raises(OSError, match="has no VmNothing"):
        status_bytes("VmNothing")
    with pytest.raises(FileNotFoundError):
        status_bytes("VmRSS", 2**30)


def test_without_torch() -> None:
    code = "import sys, strata.core.files, strata.core.processes, strata.core.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
