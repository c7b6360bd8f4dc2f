"""Device work on this machine: warm single-threaded worker processes, or (workers=0) this process itself."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from strata.core.errors import BadInput, one_line
from strata.engines import wire
from strata.engines.base import EngineFailed, Outcome, Program, time_limit
from strata.engines.common_process import ForkServer, common_process, kill_child
from strata.engines.shared_memory import BlockLayout, SharedBlock


def default_workers() -> int:
    """What the environment's STRATA_WORKERS says; else one per core this process may use."""
    asked = os.environ.get("STRATA_WORKERS")
    if asked:
        if not (asked.isascii() and asked.isdecimal()):
            raise BadInput(f"STRATA_WORKERS is a number of worker processes, such as 2 or 0, not {asked!r}")
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InlineEngine:
    """Every job in this process, one after the other. Same bits as worker processes, because also single-threaded."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._is_ready = False

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        if not self._is_ready:
            self.program.ready()
            self._is_ready = True
        for index, job in enumerate(jobs):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                yield Outcome(index, self.program(job, state))
            except Exception as error:
                yield Outcome(index, None, one_line(error, kind=True), traceback.format_exc())
            finally:
                torch.set_num_threads(threads)

    def close(self) -> None:
        pass


@dataclass
class WorkerProcess:
    pid: int
    pipe: Connection
    sender: wire.Sender
    job: int | None = None
    until: float = math.inf  # when its job is given up


class LocalEngine:
    """Worker processes forked from one prepared process (see fork_server.py).

    A worker that dies is replaced and its job tried once more. `timeout` (seconds of real time, off by default because
    results would then depend on the machine) ends a worker whose device hangs; see time_limit.
    `shared` are the types (with a `.hash`) that are sent to each worker only once.
    """

    def __init__(
        self,
        program: Program,
        workers: int,
        shared: tuple[type, ...] = (),
        retries: int = 1,
        timeout: float | None = None,
    ) -> None:
        if workers < 1:
            raise BadInput(f"workers must be at least 1, not {workers} (0 = no worker processes is InlineEngine)")
        self._main, self._program, self._data = _pickled(program)
        self._size, self._shared, self._retries, self._timeout = workers, shared, retries, timeout
        self._workers: list[WorkerProcess] = []
        self._block: SharedBlock | None = None
        self._process: ForkServer | None = None
        self._start()

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        self._publish(state)
        waiting = deque(range(len(jobs)))
        deaths = [0] * len(jobs)
        open_jobs = len(jobs)
        try:
            while open_jobs:
                busy = [worker for worker in self._workers if worker.job is not None]
                while waiting and len(busy) < self._size:
                    worker = self._idle()
                    worker.job = waiting.popleft()
                    worker.until = time.monotonic() + time_limit(jobs[worker.job], self._timeout)
                    busy.append(worker)
                    with contextlib.suppress(OSError):  # it died: seen below, as the end of its pipe
                        worker.pipe.send_bytes(worker.sender.dump(jobs[worker.job]))
                ready = set(map(id, wait([worker.pipe for worker in busy], self._patience(busy))))
                for worker in busy:
                    index = worker.job
                    assert index is not None
                    if id(worker.pipe) in ready:
                        answer = _receive(worker.pipe)
                        if answer is not None:
                            worker.job = None
                            open_jobs -= 1
                            yield Outcome(index, *answer)
                            continue
                        self._remove(worker)
                        deaths[index] += 1
                        if deaths[index] <= self._retries:
                            waiting.appendleft(index)
                            continue
                        reason = f"its worker process was killed {deaths[index]} times"
                    elif time.monotonic() >= worker.until:
                        self._remove(worker)
                        reason = f"no answer within {time_limit(jobs[index], self._timeout):g} s"
                    else:
                        continue
                    open_jobs -= 1
                    yield Outcome(index, None, reason)
        finally:  # the caller gave up: what still runs is of no use
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._remove(worker)

    def close(self) -> None:
        for worker in list(self._workers):
            self._remove(worker)
        self._end_server()
        if self._block is not None:
            self._block.close()
            self._block = None
        for block in self._data:
            block.close()

    def _end_server(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with contextlib.suppress(EOFError, OSError):  # until nobody holds the other end: it has ended
            while True:
                self._pipe.recv_bytes()
        self._control.close()
        self._pipe.close()
        self._process = None

    def _patience(self, busy: list[WorkerProcess]) -> float | None:
        first = min(worker.until for worker in busy)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _publish(self, state: Mapping[str, Tensor]) -> None:
        layout = BlockLayout.of(state)
        if self._block is None or self._block.layout != layout:
            for worker in list(self._workers):
                self._remove(worker)
            if self._block is not None:
                self._block.close()
            self._block = SharedBlock(layout)
            self._block_is_sent = False
        self._block.write(state)

    def _start(self) -> None:
        """Does not wait until the program is ready: that time is the caller's."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = common_process().fork_server(theirs)
            except OSError:  # it was killed just now
                self._process = common_process().fork_server(theirs)
        self._control, self._pipe = ours, Connection(os.dup(ours.fileno()))
        self._block_is_sent = False
        self._is_ready = False
        # ends of its own: `close` may come while it still writes
        own = (ours.dup(), Connection(os.dup(ours.fileno())))
        threading.Thread(target=self._send_program, args=own, daemon=True).start()

    def _send_program(self, control: socket.socket, pipe: Connection) -> None:
        # the other end may be gone: seen when it is asked for a worker
        with control, pipe, contextlib.suppress(OSError):
            pipe.send_bytes(wire.dump((self._main, [block.layout for block in self._data])))
            for block in self._data:
                socket.send_fds(control, [b"."], [block.fd])
            pipe.send_bytes(self._program)

    def _idle(self) -> WorkerProcess:
        for worker in [one for one in self._workers if one.job is None]:
            if not worker.pipe.poll():
                return worker
            self._remove(worker)  # an idle one has nothing to say: it has died, and no job is to blame
        try:
            worker = self._fork()
        except (OSError, EOFError):  # the fork server was killed, and its workers with it: once more from the start
            self._end_server()
            self._start()
            try:
                worker = self._fork()
            except (OSError, EOFError) as error:
                raise EngineFailed("the process that starts the workers was killed twice") from error
        self._workers.append(worker)
        return worker

    def _fork(self) -> WorkerProcess:
        if not self._is_ready:
            failure = wire.load(self._pipe.recv_bytes())
            if failure is not None:
                error, text = failure
                if isinstance(error, BadInput):
                    raise error
                raise EngineFailed(f"the workers' program does not start:\n{text}") from error
            self._is_ready = True
        assert self._block is not None
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno()] if self._block_is_sent else [self._block.fd, theirs.fileno()]
            self._pipe.send_bytes(wire.dump(None if self._block_is_sent else self._block.layout))
            socket.send_fds(self._control, [b"."], fds)
        self._block_is_sent = True
        pid = wire.load(self._pipe.recv_bytes())
        return WorkerProcess(pid, Connection(ours.detach()), wire.Sender(self._shared))

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        # A worker that computes does not see its pipe close, so it is ended by its own process id.
        if self._process is not None:
            kill_child(worker.pid, self._process.pid)


def _receive(pipe: Connection) -> tuple[Any, str | None, str] | None:
    try:
        answer: tuple[Any, str | None, str] = wire.load(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return answer


def _pickled(program: Program) -> tuple[dict[str, str] | None, bytes, list[SharedBlock]]:
    """Where to find the script that the program refers to, if it does (in multiprocessing's words); the program; and
    its large tensors, in shared memory."""
    try:
        data, blocks = wire.dump_program(program)
    except Exception as error:
        raise BadInput(
            f"the model or training settings cannot be sent to worker processes ({error}): define them at the top "
            "level of a module, or use workers=0"
        ) from error
    if b"__main__" not in data:
        return None, data, blocks
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return {"init_main_from_name": spec.name}, data, blocks
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):  # "<stdin>" where a script comes by `python - < script`
        raise BadInput(
            "the model is defined in an interactive session or a script from standard input, which worker processes "
            "cannot see: put it in a file of its own, or use workers=0"
        )
    return {"init_main_from_path": os.path.abspath(path)}, data, blocks
