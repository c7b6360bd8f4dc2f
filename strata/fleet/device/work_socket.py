"""How the client app reaches the process that does a device's work: over a socket that only this user can open.

Flower starts a client app per message. Loading torch, the data and the model for each would cost seconds and a lot of
memory, so they live in one process (work_process.py) that forks a child per message. It is started here when it is not
there, and ends with the SuperNode, when another model is asked for, or after a while without work.
No torch in this file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import locked, open_to_append
from strata.core.importing import child_command
from strata.fleet.protocol.settings import DeviceSettings

LENGTH = 8
LARGEST_NOTE = 1 << 20
START_SECONDS = 600.0  # torch, the data and the model; slow on a small device


class WorkProcessFailed(Exception):
    """The device's working process cannot be reached or does not start."""


def ask(settings: DeviceSettings, model: str, message: bytes, deadline: float | None, owner: int) -> bytes:
    """The answer to the server's `message`, from a fork of the process that has `model` ready.

    `owner`: the process with which all of it is to end.
    """
    note = {"model": model, "settings": asdict(settings), "deadline": deadline, "client": os.getpid()}
    for _ in range(2):  # the second time in a new process: the first may have been at its end, or have another model
        with connection(settings, owner) as link:
            try:
                send(link, json.dumps(note).encode())
                send(link, message)
                answer = receive(link)
            except OSError:
                answer = None
        if answer is not None and answer != b"":
            return answer
    raise WorkProcessFailed(f"this device's working process ended without an answer: see {log_file(settings)}")


@contextlib.contextmanager
def connection(settings: DeviceSettings, owner: int) -> Iterator[socket.socket]:
    path = socket_path(settings)
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "work_process.lock"):  # two client apps must not start two processes
        link = _connect(path) or _start(settings, path, owner)
    with link:
        yield link


def _connect(path: Path) -> socket.socket | None:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(str(path))
    except OSError:  # nobody there
        link.close()
        return None
    return link


def _start(settings: DeviceSettings, path: Path, owner: int) -> socket.socket:
    from strata.planning.runtime import child_environment  # one thread, one heap

    ours, theirs = socket.socketpair()
    with ours, theirs, open_to_append(log_file(settings)) as log:
        arguments = (str(theirs.fileno()), str(path), str(owner))
        command = child_command("strata.fleet.device.work_process", *arguments)
        child = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(START_SECONDS)
        try:
            listening = ours.recv(1)
        except OSError:
            listening = b""
    link = _connect(path) if listening else None
    if link is None:
        child.kill()
        child.wait()
        raise WorkProcessFailed(f"this device's working process does not start: see {log_file(settings)}")
    return link


def log_file(settings: DeviceSettings) -> Path:
    return settings.folder / "device.log"


def socket_path(settings: DeviceSettings) -> Path:
    """Short, because a socket's path may have only some hundred characters; in a folder of this user's alone."""
    place = Path(tempfile.gettempdir()) / f"strata-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BadInput(f"{place} belongs to somebody else or is open to others: remove it, or set TMPDIR")
    digest = hashlib.sha256(str(settings.folder.resolve()).encode()).hexdigest()[:16]
    return place / f"{digest}.sock"


def send(link: socket.socket, data: bytes) -> None:
    link.sendall(len(data).to_bytes(LENGTH, "little"))
    link.sendall(data)


def receive(link: socket.socket, largest: int | None = None) -> bytes | None:
    """None where the other end is gone."""
    head = _exactly(link, LENGTH)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if largest is not None and length > largest:
        return None
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = link.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def note_of(data: bytes) -> Mapping[str, Any]:
    note: Mapping[str, Any] = json.loads(data)
    return note
