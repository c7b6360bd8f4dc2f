"""The process that all engines of a process have in common: it imports torch once, and forks a fork server for each.

Such a fork server makes an engine's program ready once, then forks a worker on request. So a second engine (another run
of a comparison) costs no imports; a new worker, or one in place of a killed one, costs milliseconds; and a user's
script is never run again in a child. Started as `python -m strata.engines.fork_server FD PID`, with the pid of the
server, and ends with that process.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

import strata.training  # noqa: F401  what programs are made of
from strata.core.errors import one_line
from strata.core.processes import die_with_parent
from strata.engines import wire
from strata.engines.shared_memory import BlockLayout, SharedBlock

LONGEST = 1 << 20  # bytes of a request: an environment, a search path


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    requests = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    own_pid = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(requests, LONGEST, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            die_with_parent(own_pid)
            requests.close()
            code = 1
            try:
                _begin(pickle.loads(message), fds)
                code = 0
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def _begin(surroundings: tuple[dict[str, str], list[str], str], fds: list[int]) -> None:
    """In a child: as if it had been started where the engine was, with its environment and streams."""
    environment, path, folder = surroundings
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    importlib.invalidate_caches()
    os.chdir(folder)
    control, *streams = fds
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # programs may have children
    serve(socket.socket(fileno=control))


def serve(control: socket.socket) -> None:
    """The fork server of one engine."""
    pipe = Connection(os.dup(control.fileno()))
    try:
        try:
            main_module, blocks, program_bytes = _received(pipe, control)
        except EOFError:  # the server is gone
            return
        if main_module is not None:  # the program refers to the user's script, as with multiprocessing's spawn
            multiprocessing.spawn.prepare(main_module)
        program = wire.load_program(program_bytes, blocks)
        del program_bytes
        program.ready()
    except BaseException as error:  # reported, not raised: the server says it to the user
        pipe.send_bytes(wire.dump((error if _travels(error) else None, traceback.format_exc())))
        return
    pipe.send_bytes(wire.dump(None))
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    state: SharedBlock | None = None
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        new_layout: BlockLayout | None = wire.load(data)
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if new_layout is not None:
            state = SharedBlock(new_layout, fds.pop(0))
        assert state is not None
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(own_pid)
            control.close()
            pipe.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                work(program, Connection(fds[0]), state)
                code = 0
            finally:
                os._exit(code)
        os.close(fds[0])
        pipe.send_bytes(wire.dump(pid))


def _received(pipe: Connection, control: socket.socket) -> tuple[dict[str, str] | None, list[SharedBlock], bytes]:
    """Where the user's script is, the program's large tensors, and the program."""
    main_module, layouts = wire.load(pipe.recv_bytes())
    blocks = []
    for layout in layouts:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            raise EOFError
        blocks.append(SharedBlock(layout, fds[0]))
        blocks[-1].close()  # the memory stays mapped
    return main_module, blocks, pipe.recv_bytes()


def _travels(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return isinstance(error, Exception)


def work(program: Any, pipe: Connection, state: SharedBlock) -> None:
    """One worker: jobs in, results out, until the server closes the pipe."""
    receiver = wire.Receiver()
    while True:
        try:
            job = receiver.load(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = wire.dump((program(job, state.tensors), None, ""))
        except Exception as error:
            answer = wire.dump((None, one_line(error, kind=True), traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except ConnectionError:
            return


if __name__ == "__main__":
    main()
