"""Files that are whole or not there (written beside their place, flushed to disk, then renamed), that nobody else can
read, or that one process has for itself. Nothing is written through a symbolic link: who may write to a folder could
point one at any file of ours. No torch here: a fleet's devices use this before they load it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from strata.core.errors import BadInput
from strata.core.paths import writing_to

_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")


class StorageFailed(BadInput):
    """The disk is full or refuses to write: one sentence, and what was there before is still there."""


@contextlib.contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Turns what the operating system says about `path` into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFailed(
                f"no space left to write {path}: the last checkpoint is intact; free some space, then resume the run"
            ) from error
        if error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.EISDIR,
            errno.ENOENT,
            errno.ENAMETOOLONG,
            errno.ELOOP,
        ):
            raise BadInput(
                f"cannot write to {path} ({error.strerror}): choose a folder that can be written to"
            ) from error
        raise StorageFailed(f"cannot write {path} ({error.strerror}): the last checkpoint is intact") from error


def write_atomic(path: Path, data: bytes) -> None:
    """After this returns the new content survives a power failure; before, the old one does."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with said_plainly(path):
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def is_leftover(name: str) -> bool:
    """Of a process that was killed in `write_atomic`."""
    return _TEMPORARY.search(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Where no other process writes at the same time."""
    for path in folder.iterdir():
        if is_leftover(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a regular file, made if need be; never of what a symbolic link points to."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise
        descriptor = -1
    if descriptor < 0 or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        if descriptor >= 0:
            os.close(descriptor)
        raise BadInput(
            f"{path} is a link or no ordinary file, and is not written to: remove it, or choose another folder"
        )
    return descriptor


def open_to_append(path: Path) -> IO[bytes]:
    return open(open_own(path, os.O_WRONLY | os.O_APPEND), "ab")


def own_folder(path: Path, linked: bool = False) -> None:
    """Made if need be. One that is there has to be this user's: its owner can put anything there, at any time.
    `linked`: it may be a link to such a folder, where the user named it."""
    with said_plainly(path):
        try:
            path.mkdir(parents=True)
            return  # whoever a file system says it belongs to
        except FileExistsError:
            found = path.stat() if linked else path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise BadInput(f"{path} is not a folder, or a link to one: remove it, or choose another folder")
    _refuse_others(path, found)


def check_own(path: Path) -> None:
    """A file or folder that says what is to be done, such as which code to run: nobody else's word for it."""
    with said_plainly(path):
        found = path.stat()
    _refuse_others(path, found)


def _refuse_others(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise BadInput(f"{path} belongs to another user ({user_name(found.st_uid)}): choose a folder of your own")


def user_name(number: int) -> str:
    """As the system knows it."""
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return f"number {number}"


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"there is no {path.name} in {path.parent}: is it a run folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise BadInput(f"{path} is not as Strata writes it: it holds no JSON object")
    return value


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Never over a file that is there, and never readable by others for a moment."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask says
        file.write(content)


def take_lock(descriptor: int, wait: bool = False) -> bool:
    """Of an open file; it goes with the descriptor, so the system drops it when its process is killed. False: another
    process has it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, otherwise: str | None = None) -> Iterator[None]:
    """One process at a time by this file: the next waits, or is refused with the sentence `otherwise`."""
    with writing_to(path.parent):
        descriptor = open_own(path, os.O_RDWR)
    with open(descriptor, "r+b") as file:
        if not take_lock(file.fileno(), wait=otherwise is None):
            raise BadInput(otherwise)
        yield


class Lock:
    """One run per folder. The file says which process has it."""

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        with said_plainly(folder):
            self._fd = open_own(path, os.O_RDWR)
        if not self._take():
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            who = f" (process {owner})" if owner else ""
            raise BadInput(f"{folder} is in use by another run{who}: wait for it or choose another folder")
        with said_plainly(path):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _take(self) -> bool:
        try:
            return take_lock(self._fd)
        except OSError:  # a file system without locks
            return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
