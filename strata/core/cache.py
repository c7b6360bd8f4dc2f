"""What one start of Strata works out and the next can use: files in a folder that belongs to the user alone.

A cache is only a convenience. Whatever is wrong with it (no home folder, someone else's folder, a full disk, a damaged
file) means that there is none, never an error. What is read decides how a program goes on, so nobody but the user may
be able to write it: the folder is the user's own with mode 0700, and files are the user's own too. The checksum finds
damage; it is no defence against whoever can write here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

_DIGEST = 64  # hexadecimal digits of SHA-256, then a line break, then the content


def root() -> Path | None:
    """`$STRATA_CACHE` ("off": there is none), `$XDG_CACHE_HOME/strata` or `~/.cache/strata`; None without a home."""
    chosen = os.environ.get("STRATA_CACHE")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "strata"
    except RuntimeError:
        return None


def private_folder(name: str) -> Path | None:
    """The folder of this name for the user alone, made if need be; None if there cannot be one."""
    above = root()
    if above is None:
        return None
    folder = above / name
    try:
        above.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _is_safe(above.stat()):
            return None
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return None
        if found.st_mode & 0o022:
            return None  # others could have put something there
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError:
        return None
    return folder


def _is_safe(found: os.stat_result) -> bool:
    """Of the folder above: whether nobody else (but the administrator) can put another folder in our folder's place."""
    others = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (os.getuid(), 0) and not others


def read(path: Path) -> bytes | None:
    """What `write` wrote; None if there is nothing, or not the user's own, or damaged."""
    content = read_own(path)
    if content is None:
        return None
    digest, data = content[: _DIGEST + 1], content[_DIGEST + 1 :]
    return data if digest == _checksum(data) else None


def read_own(path: Path) -> bytes | None:
    """Any file's content; None if there is none that nobody but the user can have written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                return None
            return file.read()
    except OSError:
        return None


def write(path: Path, data: bytes) -> None:
    """Whole or not at all: others may write the same at the same time. A disk that refuses is passed over."""
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(_checksum(data))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # else a power failure may leave the name without the content
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def touch(path: Path) -> None:
    """Note that a file has been of use: `prune` goes by that."""
    with contextlib.suppress(OSError):
        os.utime(path)


def prune(folder: Path, most_bytes: int) -> None:
    """Remove what has not been of use for longest, until the rest takes no more than this."""
    with contextlib.suppress(OSError):
        found = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(folder)]
        found.sort(key=lambda one: one[0].st_mtime_ns)
        total = sum(status.st_size for status, _ in found)
        for status, path in found:
            if total <= most_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= status.st_size


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + b"\n"
