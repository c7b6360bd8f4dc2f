"""The audit log of a fleet's server: who did what, from where and when.

KEYS/audit/audit.jsonl      one JSON object a line, only ever added to
KEYS/audit/audit-LINE.jsonl what was too long for one file; LINE is the number of its last line
KEYS/audit/head             number and hash of the last line of all; its lock is the log's

A line holds the SHA-256 of the line before it, also from one file to the next, so a line that was changed or removed
shows at the one after it, and at the end by `head`. The hashes have no key: whoever may write here can make a whole log
anew, which shows only where somebody keeps one of its hashes elsewhere (`strata fleet audit --verify --holds HASH`).

A log that cannot be written costs its lines and nothing else: that is said, and when it works again a line says so.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.core.files import check_own, open_own, take_lock, user_name

LARGEST = 4 << 20  # bytes of a file
LONGEST = 300  # characters of a value: some are strangers' words
LONGEST_LINE = 64 << 10  # bytes
SPACE = 64 << 10  # bytes that a disk has to have free
LOCK_SECONDS = 5.0  # for another process to write its line
NOTHING = "0" * 64  # in place of a hash, before the first line
MENDED = "log mended"  # the line before is unfinished: its writer was killed, or the power failed
AGAIN = "log works again"
HEAD_LOST = "head was missing"  # lines may be missing before this one
CURRENT, HEAD = "audit.jsonl", "head"
AUDIT = "STRATA_AUDIT"  # environment variable of server apps: where the log is

Say = Callable[[str], None]


def audit_folder(keys: Path) -> Path:
    return keys / "audit"


def this_user() -> str:
    """Who gives a command on this machine: by the system's word, not by $LOGNAME. Who is root by `sudo` is root."""
    return user_name(os.getuid())


def digest_of(line: bytes) -> str:
    """Of a line without its end."""
    return hashlib.sha256(line).hexdigest()


@dataclass(frozen=True)
class End:
    """The last line: its number and hash."""

    line: int
    digest: str

    def to_bytes(self) -> bytes:
        return f"{self.line:020d} {self.digest}\n".encode()

    @classmethod
    def of(cls, data: bytes) -> End | None:
        """None: nothing has been written yet, or this is nothing of ours."""
        number, _, digest = data[:128].decode("ascii", "replace").strip().partition(" ")
        return cls(int(number), digest) if number.isascii() and number.isdigit() and len(digest) == 64 else None


class AuditLog:
    """For any number of processes and threads at a time. `say` hears of trouble, once, and of its end."""

    def __init__(self, folder: Path, say: Say, largest: int = LARGEST) -> None:
        self.folder, self.say, self.largest = folder, say, largest
        self.missed = 0  # lines that could not be written, since
        self.since = ""
        self.trouble = ""

    def record(self, what: str, **facts: Any) -> None:
        """Never fails: the server goes on without its log rather than not at all."""
        now = _now()
        try:
            with self._locked() as head:
                if self.missed:
                    self._append(head, {"time": now, "what": AGAIN, "missed": self.missed, "since": self.since})
                    self.missed = 0
                self._append(head, {"time": now, "what": what, **_short(facts)})
        except (OSError, BadInput) as error:
            if not self.missed:
                self.since = now
            self.missed += 1
            self._complain(_reason(error))
        else:
            self._complain("")

    def look(self) -> None:
        """Says so where nothing could be written now: who writes most of the lines has only a log file to say it in."""
        try:
            with self._locked():
                os.close(self._open_current())
                disk = os.statvfs(self.folder)
                if disk.f_bavail * disk.f_frsize < SPACE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, BadInput) as error:
            self._complain(_reason(error))
        else:
            if not self.missed:
                self._complain("")

    def _complain(self, trouble: str) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        text = f"is not written: {trouble}; all else goes on" if trouble else "is written again"
        with contextlib.suppress(OSError):  # what is said may go to the same full disk
            self.say(f"the audit log {self.folder} {text}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The descriptor of `head`."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        check_own(self.folder)
        if self.folder.is_symlink():
            raise BadInput(f"{self.folder} is a link: put the folder itself there")
        descriptor = open_own(self.folder / HEAD, os.O_RDWR, 0o600)
        try:
            until = time.monotonic() + LOCK_SECONDS
            while not take_lock(descriptor):
                if time.monotonic() > until:
                    raise BadInput("another process keeps it locked")
                time.sleep(0.005)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_current(self) -> int:
        descriptor = open_own(self.folder / CURRENT, os.O_RDWR | os.O_APPEND, 0o600)
        os.fchmod(descriptor, 0o600)  # it may have been copied here by somebody
        return descriptor

    def _append(self, head: int, facts: dict[str, Any]) -> None:
        end = self._end(head)
        current = self._open_current()
        try:
            if os.fstat(current).st_size >= self.largest:
                os.rename(self.folder / CURRENT, _free(self.folder / f"audit-{end.line:012d}.jsonl"))
                os.close(current)
                current = self._open_current()
            self._write(head, current, end, facts)
        finally:
            os.close(current)

    def _end(self, head: int) -> End:
        """Of the log as it is: what `head` says, unless its writer was killed before he could write that. A line that
        was removed or changed stays so to be seen."""
        said = End.of(os.pread(head, 128, 0))
        current = self._open_current()
        try:
            size = os.fstat(current).st_size
            tail = os.pread(current, LONGEST_LINE, max(0, size - LONGEST_LINE))
            *_, last, rest = [b"", *tail.split(b"\n")]
            known = self._found(last) if said is None else said
            if rest:  # unfinished: it becomes a line, and the next says that it is none
                _write_all(current, b"\n")
                torn = End(known.line + 1, digest_of(rest))
                return self._write(head, current, torn, {"time": _now(), "what": MENDED})
            if said is None and known.line:
                return self._write(head, current, known, {"time": _now(), "what": HEAD_LOST})
        finally:
            os.close(current)
        facts = _read(last) or {}
        whole = facts.get("line") == known.line + 1 and facts.get("before") == known.digest
        return End(known.line + 1, digest_of(last)) if whole else known

    def _found(self, last: bytes) -> End:
        """Where `head` is gone: by the last line that there is."""
        older = sorted(self.folder.glob("audit-*.jsonl"))
        if not last and older:
            last = older[-1].read_bytes().removesuffix(b"\n").rpartition(b"\n")[2]
        number = (_read(last) or {}).get("line")
        return End(number, digest_of(last)) if isinstance(number, int) else End(0, NOTHING)

    def _write(self, head: int, current: int, end: End, facts: dict[str, Any]) -> End:
        line = json.dumps({"line": end.line + 1, **facts, "before": end.digest}).encode()
        _write_all(current, line + b"\n")
        os.fdatasync(current)  # before `head`: that must never be ahead of the log
        new = End(end.line + 1, digest_of(line))
        os.pwrite(head, new.to_bytes(), 0)
        return new


def _free(path: Path) -> Path:
    """Nothing is written over, whatever somebody has done to the numbers."""
    return path if not path.exists() else _free(path.with_name(f"{path.stem}-again.jsonl"))


def _write_all(descriptor: int, data: bytes) -> None:
    """All of it or nothing: half a line would be there for good."""
    before = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _short(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what is not known. JSON escapes what a terminal would act on."""
    values = {key: value[:LONGEST] if isinstance(value, str) else value for key, value in facts.items()}
    return {key: value for key, value in values.items() if value is not None and value != ""}


def _reason(error: OSError | BadInput) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


# --- what comes in numbers -------------------------------------------------------------------------------------------

WINDOW = 60.0  # seconds
MOST = 20  # different ones of a kind in that time


@dataclass
class Repeated:
    """Events that a stranger or a program may cause as often as it likes: each has one line a minute, and a second one
    says how often it came since. Of one kind there are a few different ones a minute; the others are counted."""

    log: AuditLog
    clock: Callable[[], float] = time.monotonic
    seen: dict[str, dict[tuple[tuple[str, Any], ...], int]] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, what: str, **facts: Any) -> None:
        with self._lock:
            self._end_window()
            key = tuple(facts.items())
            kind = self.seen.setdefault(what, {})
            if key in kind:
                kind[key] += 1
            elif len(kind) < MOST:
                kind[key] = 0
                self.log.record(what, **facts)
            else:
                self.others[what] = self.others.get(what, 0) + 1

    @property
    def due(self) -> bool:
        return bool(self.seen) and self.clock() >= self.until

    def flush(self, now: bool = False) -> None:
        """Writes what was counted, if its time is over."""
        with self._lock:
            self._end_window(now)

    def _end_window(self, now: bool = False) -> None:
        if not now and self.clock() < self.until:
            return
        for what, kind in self.seen.items():
            for key, times in kind.items():
                if times:
                    self.log.record(what, **dict(key), again=times)
        for what, times in self.others.items():
            self.log.record(what, others=times)
        self.seen, self.others, self.until = {}, {}, self.clock() + WINDOW


# --- reading and checking --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """`place`: file and line there, as in audit.jsonl:3."""

    place: str
    text: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.text)

    @property
    def facts(self) -> dict[str, Any] | None:
        return _read(self.text)


class Wrong(BadInput):
    """The log is not as it was written: the first place where that shows."""


def read_log(folder: Path) -> tuple[Iterator[Line], End | None]:
    """All lines in order, and what `head` says. A server that goes on writing is no trouble."""
    if not folder.is_dir():
        raise BadInput(f"there is no audit log {folder}: a server with these keys makes it when it is started")
    try:
        with _read_lock(folder):
            older = sorted(folder.glob("audit-*.jsonl"))
            current = (folder / CURRENT).read_bytes() if (folder / CURRENT).exists() else b""
            head = (folder / HEAD).read_bytes() if (folder / HEAD).exists() else b""
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error.strerror}): run as its owner") from None
    return _lines(older, current), End.of(head)


@contextlib.contextmanager
def _read_lock(folder: Path) -> Iterator[None]:
    """For a moment: whoever holds it longer keeps the server from writing."""
    try:
        descriptor = os.open(folder / HEAD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        take_lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lines(older: list[Path], current: bytes) -> Iterator[Line]:
    for path in older:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): run as its owner") from None
        yield from _lines_of(path.name, content)
    yield from _lines_of(CURRENT, current)


def _lines_of(name: str, content: bytes) -> Iterator[Line]:
    for number, text in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), start=1):
        yield Line(f"{name}:{number}", text)


def verify(folder: Path, first: int = 1, holds: str | None = None) -> End:
    """The end of a log that is whole from line `first` on, and has a line with the hash `holds`. Else Wrong."""
    lines, head = read_log(folder)
    end: End | None = None
    unfinished: Line | None = None
    found = holds is None
    ends: list[End] = []  # of the last two lines
    for line in lines:
        facts = line.facts
        if unfinished is not None and (facts is None or facts.get("what") != MENDED):
            raise Wrong(f"{unfinished.place} is not as it was written: it is no line of an audit log")
        if facts is None:
            unfinished, end = line, End(first if end is None else end.line + 1, line.digest)
            continue
        end, unfinished = _next(line, facts, end, first), None
        found = found or line.digest == holds
        ends = [*ends[-1:], end]
    if unfinished is not None and head is not None and end is not None and head.line >= end.line:
        raise Wrong(f"{unfinished.place} is not as it was written: it is no line of an audit log")
    _check_head(folder, head, ends, end)
    if not found:
        raise Wrong(f"no line of {folder} has the hash {holds}: the log was cut or made anew since, or is another one")
    return end or End(0, NOTHING)


def _next(line: Line, facts: dict[str, Any], end: End | None, first: int) -> End:
    number = facts.get("line")
    if not isinstance(number, int):
        raise Wrong(f"{line.place} is not as it was written: it has no number")
    if end is None:
        if number != first:
            raise Wrong(f"{line.place} is line {number} of the log, not {first}: what was before it is missing")
        if first == 1 and facts.get("before") != NOTHING:
            raise Wrong(f"{line.place} is not as it was written: nothing is before the first line")
    elif number != end.line + 1:
        raise Wrong(f"{line.place} is line {number} of the log, and comes after line {end.line}: lines are missing")
    elif facts.get("before") != end.digest:
        raise Wrong(f"line {end.line} of the log, before {line.place}, is not as it was written: its hash is another")
    return End(number, line.digest)


def _check_head(folder: Path, head: End | None, ends: list[End], end: End | None) -> None:
    """The last line is the one that `head` names; or one later, whose writer was killed."""
    if head is None:
        if end is not None:
            raise Wrong(f"{folder / HEAD} is missing or damaged: whether lines are missing at the end cannot be told")
        return
    last = end.line if end is not None else 0
    if head.line > last:
        raise Wrong(f"the log ends with line {last}, and line {head.line} was written: lines are missing at the end")
    if head not in ends and head.line + 1 >= last:
        raise Wrong(f"line {head.line} of the log is not as it was written: its hash is another")
    if head.line + 1 < last:
        raise Wrong(f"line {last} is the log's last, and {folder / HEAD} knows {head.line}: lines were put in")
