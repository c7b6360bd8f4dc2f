"""The process in which a device works: has torch, the data and the model ready, and forks a child for every message.

The child does the work under a hard limit and is gone afterwards, so this process never grows. It is killed at the
deadline, and when the client app or the SuperNode is gone. Started by work_socket.py as
`python -m strata.fleet.device.work_process READY_FD SOCKET OWNER_PID`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from strata.core.errors import BadInput, one_line
from strata.core.processes import die_with_parent
from strata.federation.kept_prefixes import FOLDER
from strata.fleet.device.work import ModelNotAgreed, PreparedDevice
from strata.fleet.device.work_socket import LARGEST_NOTE, note_of, receive, send
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import failure
from strata.fleet.protocol.settings import DeviceSettings

IDLE_SECONDS = 900.0
GLANCE = 5.0  # seconds between looks at an owner that cannot be polled
HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Owner:
    """The process with which this one ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.descriptor: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # Linux; elsewhere, or if it is gone, `is_gone` looks
            self.descriptor = os.pidfd_open(pid)

    def is_gone(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return self.descriptor is not None and bool(select.select([self.descriptor], [], [], 0)[0])


def main() -> None:
    ready, path, owner = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), Owner(int(sys.argv[3]))
    torch.set_num_threads(1)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a process that was killed: whoever starts this one holds the lock
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    ready.send(b".")
    ready.close()
    prepared: PreparedDevice | None = None
    key: object = None
    with contextlib.ExitStack() as listening:
        listening.callback(listener.close)
        listening.callback(path.unlink, missing_ok=True)
        while _comes(listener, owner):
            link, _ = listener.accept()
            with link:
                data = receive(link, LARGEST_NOTE)
                if data is None:
                    continue
                note = note_of(data)
                wanted = (note["model"], DeviceSettings(**note["settings"]))
                if prepared is not None and wanted != key:
                    listening.close()  # before the link: else the client app might come back to this process
                    return  # nothing was answered, so the client app starts another process
                if prepared is None:
                    try:
                        prepared, key = PreparedDevice.of(*wanted), wanted
                        kept = wanted[1].folder / FOLDER
                        shutil.rmtree(kept, ignore_errors=True)  # of a process that was killed
                        listening.callback(shutil.rmtree, kept, ignore_errors=True)
                    except Exception as error:
                        listening.close()
                        receive(link)
                        send(link, kept_here(error, "model" if isinstance(error, ModelNotAgreed) else "unready"))
                        return
                serve(prepared, listener, link, note["deadline"], note["client"], owner)


def serve(
    prepared: PreparedDevice,
    listener: socket.socket,
    link: socket.socket,
    deadline: float | None,
    client: int,
    owner: Owner,
) -> None:
    """One message, in a child."""
    began = time.monotonic()
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(parent)
            listener.close()
            os.close(read)
            code = _work(prepared, link, client)
        finally:
            os._exit(code)  # the parent's exit handlers are not ours to run
    os.close(write)
    try:
        ended = _wait(pid, read, link, owner, None if deadline is None else began + deadline)
    finally:
        os.close(read)
    if ended is not None:
        with contextlib.suppress(OSError):
            send(link, ended)


def _work(prepared: PreparedDevice, link: socket.socket, client: int) -> int:
    message = receive(link)
    if message is None:
        return 1
    try:
        answer = prepared.answer(codec.decode(message), client)
    except (codec.Malformed, BadInput) as error:
        answer = kept_here(error, "refused")
    except Exception as error:
        answer = kept_here(error, "failed")
    send(link, answer)
    return 0


def kept_here(error: Exception, kind: str) -> bytes:
    """What the server is told of an error; what it says goes to device.log, which is this process's output."""
    if isinstance(error, BadInput | codec.Malformed):
        print(f"{kind}: {one_line(error)}", flush=True)
    else:
        traceback.print_exception(error)
    return failure(kind)


def _wait(pid: int, ending: int, link: socket.socket, owner: Owner, until: float | None) -> bytes | None:
    """What to say in place of the child, once it has ended: None where it spoke for itself, or nobody listens."""
    poll = select.poll()
    poll.register(ending, select.POLLIN | select.POLLHUP)
    poll.register(link, HANGUP)
    late = False
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        found = {where for where, _ in poll.poll(1000 * min(GLANCE, GLANCE if left is None else left))}
        if ending in found:
            break
        late = until is not None and time.monotonic() >= until
        if late or link.fileno() in found or owner.is_gone():
            os.kill(pid, signal.SIGKILL)
            break
    _, status = os.waitpid(pid, 0)
    if late:
        return failure("late")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        print(f"memory: the training process was ended by {name}: out of memory, most likely", flush=True)
        return failure("memory")
    return None if status == 0 else failure("failed")


def _comes(listener: socket.socket, owner: Owner) -> bool:
    """True when there is a connection; False when it is time to go."""
    until = time.monotonic() + IDLE_SECONDS
    watched: list[socket.socket | int] = [listener, *([] if owner.descriptor is None else [owner.descriptor])]
    while time.monotonic() < until:
        found, _, _ = select.select(watched, [], [], GLANCE if owner.descriptor is None else IDLE_SECONDS)
        if listener in found:
            return True
        if owner.is_gone():
            return False
    return False


if __name__ == "__main__":
    main()
