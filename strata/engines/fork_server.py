"""The process that workers are forked from: imports torch and makes the program ready once, then forks on request.

So a new worker, or one in place of a killed one, costs milliseconds; and a user's script is never run again in a child.
Started as `python -m strata.engines.fork_server FD PID`, with the pid of the server, and ends with that process.
"""

from __future__ import annotations

import gc
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

from strata.core.errors import one_line
from strata.core.processes import die_with_parent
from strata.engines import wire
from strata.engines.shared_memory import BlockLayout, SharedBlock


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers; not before, programs may have children
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
