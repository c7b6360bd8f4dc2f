"""Fork servers for the engines of this process, all from one process that has imported torch (see fork_server.py)."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import threading

from strata.core.importing import child_command, child_path
from strata.core.processes import parent_of

IN_WORKER = "STRATA_WORKER"  # set in everything an engine starts
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class CommonProcess:
    """Ends with the thread that made it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = child_command("strata.engines.fork_server", str(theirs.fileno()), str(os.getpid()))
        self._process = subprocess.Popen(  # a session of its own: Ctrl-C is for the server alone
            command, pass_fds=[theirs.fileno()], env=_environment(), stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._lock, self._owner = threading.Lock(), os.getpid()

    @property
    def is_ours(self) -> bool:
        """Not that of a process which forked this one."""
        return self._owner == os.getpid()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork_server(self, control: socket.socket) -> ForkServer:
        """One that listens at the other end of `control`, and has this process's folder, environment and streams.

        OSError: the common process is gone."""
        surroundings = (_environment(), child_path().split(os.pathsep), os.getcwd())
        with self._lock:
            socket.send_fds(self._requests, [pickle.dumps(surroundings)], [control.fileno(), 1, 2])
            answer = self._requests.recv(64)
        if not answer:
            raise ConnectionResetError("the common process ended")
        return ForkServer(int(answer), self._process.pid)

    def end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


class ForkServer:
    def __init__(self, pid: int, parent: int) -> None:
        self.pid, self._parent = pid, parent

    def kill(self) -> None:
        kill_child(self.pid, self._parent)


def kill_child(pid: int, parent: int) -> None:
    """Its parent's children are reaped by the kernel, so the number may already be somebody else's; on a system without
    /proc it is trusted."""
    if not os.path.isdir("/proc/self") or parent_of(pid) == parent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_common: CommonProcess | None = None


def common_process() -> CommonProcess:
    """This process's; in a thread other than the main one, with which it would end, one of its own."""
    global _common
    if threading.current_thread() is not threading.main_thread():
        return CommonProcess()
    if _common is None or not _common.is_ours or not _common.is_alive:
        _end()
        _common = CommonProcess()
    return _common


@atexit.register
def _end() -> None:
    if _common is not None and _common.is_ours:
        _common.end()


def _environment() -> dict[str, str]:
    return {**os.environ, **THREADS, "PYTHONPATH": child_path(), IN_WORKER: "1"}
