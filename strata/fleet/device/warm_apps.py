"""Client apps forked from a process that has Flower loaded: a message costs a fork, not two seconds of imports.

That process is itself forked from the SuperNode's before anything is running there, so they share their pages.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable

from strata.core.processes import die_with_parent
from strata.fleet.app_processes import StartedApps

STARTED = b"started"
LONGEST = 1 << 16  # bytes of a request: addresses, a token


class WarmApps:
    """Made by the main thread, which lives as long as the process: the warm process ends with it."""

    program = "flwr-clientapp"

    def __init__(self, otherwise: StartedApps) -> None:
        """`otherwise`: should the warm process be gone (killed for want of memory, most likely)."""
        from flwr.supernode.cli import flwr_clientapp

        import strata.fleet.device.client_app  # noqa: F401  what the apps will import

        self._otherwise = otherwise
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        gc.freeze()  # a collection writes to all it looks at, and pages that are written to are shared no longer
        if os.fork() == 0:
            self._requests.close()
            die_with_parent(parent)
            sys.exit(_serve(theirs, flwr_clientapp))
        theirs.close()

    def start(self, arguments: list[str], token: str) -> None:
        try:
            # not on a command line: what a forked process is given, nobody sees
            self._requests.send(json.dumps([*arguments, "--token", token]).encode())
            answer = self._requests.recv(LONGEST)
        except OSError:
            answer = b""
        if not answer:
            self._otherwise.start(arguments, token)
        elif answer != STARTED:
            raise OSError(answer.decode())

    def tidy(self) -> None:
        self._otherwise.tidy()


def _serve(requests: socket.socket, app: Callable[[], None]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears up after them
    warm = os.getpid()
    while request := requests.recv(LONGEST):
        try:
            child = os.fork()
        except OSError as error:
            requests.send(str(error).encode())
            continue
        if child == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = [WarmApps.program, *json.loads(request), "--parent-pid", str(warm)]
            app()
            return 0
        requests.send(STARTED)
    return 0
