"""A process that has imported torch and Strata and forks one child per command: a command starts in milliseconds.

`python -m tests.docs.warm SOCKET` serves; `shim.py`, which is `strata` and `python` on the PATH of documented commands,
asks it. A child has the caller's standard streams, folder and environment; what it runs is Strata's own entry point.
Three things differ from a user's machine, none of which changes a result: there are no worker processes unless
asked for; what Python and torch hold resident, which `strata plan` measures in the background, is given; and ResNet20,
which most pages use, is exported once for all.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any


def serve(path: str) -> None:
    import torch

    torch.set_num_threads(1)
    for name in ("planning.make", "planning.picture", "planning.verify", "federation", "data", "report", "experiments"):
        importlib.import_module(f"strata.{name}")
    from strata.planning import runtime
    from strata.runs import workers

    workers.default_workers = lambda: 0  # type: ignore[attr-defined]
    runtime.start_measuring = _given_runtime
    _export_once()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:  # closed: the tests have ended
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()


def _export_once() -> None:
    from strata.graph import ChannelGraph, InputSpec
    from strata.models import resnet20

    def looks(model: Any, inputs: Any) -> tuple[str, str]:
        return repr(model), str(InputSpec.of(inputs))

    model, shape = resnet20(), (3, 32, 32)
    known, ready = looks(model, shape), ChannelGraph(model, shape)
    export = ChannelGraph.__init__

    def initialise(self: ChannelGraph, model: Any, input_shape: Any, *rest: Any, **named: Any) -> None:
        usual = not rest and named in ({}, {"width": "residual"})
        if usual and looks(model, input_shape) == known:
            self.__dict__.update(ready.__dict__)
        else:
            export(self, model, input_shape, *rest, **named)

    ChannelGraph.__init__ = initialise  # type: ignore[method-assign]


def _given_runtime() -> subprocess.Popen[str]:
    return subprocess.Popen(["echo", str(300 * 2**20)], stdout=subprocess.PIPE, text=True)


def answer(connection: socket.socket) -> None:
    """In a child: forks the command itself, so that however that one ends there is somebody to say so."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    request = json.loads(message)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        connection.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os._exit(carry_out(request))
    for stream in streams:
        os.close(stream)
    connection.sendall(json.dumps({"pid": child}).encode() + b"\n")
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:  # nobody listens any more
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    if log := os.environ.get("WARM_CPU"):  # to see what the documented commands cost
        with open(log, "a") as out:
            print(f"{used.ru_utime + used.ru_stime:6.1f} s  {' '.join(request['argv'])}", file=out)
    try:
        connection.sendall(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
    finally:
        os._exit(0)


def carry_out(request: dict[str, Any]) -> int:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    try:
        if request["program"] == "session":
            return session(socket.socket(fileno=os.dup(0)))
        if request["program"] == "strata":
            from strata.cli import main

            return main(sys.argv[1:])
        script = sys.argv[1]
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def session(line: socket.socket) -> int:
    """Blocks of Python from one page, in one namespace; answers each with its exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, os.getcwd())
    for text in line.makefile("r"):
        block = json.loads(text)
        try:
            exec(compile(block["code"], block["where"], "exec"), module.__dict__)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        line.sendall(f"{code}\n".encode())
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
