"""Fetch a file with checksum and resume, and unpack an archive without trusting it."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import stat
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from strata.core.errors import BadInput
from strata.core.files import take_lock

CHUNK = 1 << 20
Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where known


class _Broken(Exception):
    """The connection broke off; what came so far is in the .part file."""


def digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def check_address(url: str) -> str:
    """A mirror as users write it: something to put /FILE behind."""
    try:
        parts = urllib.parse.urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a bracket without an IPv6 address, a port that is no number, a host that is no name
        right = False
    if not right or "@" in parts.netloc or parts.query or parts.fragment:
        raise BadInput(
            f"a mirror is the plain http or https address of a folder, such as https://example.org/data, not {url!r}"
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadInput(
            f"spaces and letters beyond ASCII are written as %20 and the like in a mirror, not as in {url!r}"
        )
    return url


def fetch(
    url: str,
    target: Path,
    md5: str | None,
    attempts: int = 5,
    timeout: float = 30.0,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download `url` to `target`. A part that is already there (target.part) is continued; `target` appears only
    when the file is whole and its checksum right. Without a published checksum the sha256 of the first download is kept
    next to it (target.sha256) and later ones must agree.
    """
    if target.exists():
        _check(target, md5, url)
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part):
            resumed = part.stat().st_size > 0
            try:
                _complete(url, part, attempts, timeout, progress)
                _check(part, md5, url, named=target)
            except _Wrong:
                os.truncate(part, 0)
                if not resumed:
                    raise
                # the old part may have been the trouble: once more, from the beginning
                _complete(url, part, attempts, timeout, progress)
                try:
                    _check(part, md5, url, named=target)
                except _Wrong:
                    os.truncate(part, 0)
                    raise
            part.replace(target)
    except OSError as error:
        raise BadInput(f"{error.filename or target} cannot be written: {error.strerror}") from error
    return target


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """One download per file: two would write into the same part."""
    with part.open("ab") as file:
        if not take_lock(file.fileno()):
            raise BadInput(f"{part} is being downloaded by another process; wait for that one")
        try:
            yield
        finally:
            if part.exists() and part.stat().st_size == 0:
                part.unlink()


class _Wrong(BadInput):
    """Not the published file."""


def _check(path: Path, md5: str | None, url: str, named: Path | None = None) -> None:
    named = named or path
    if md5 is not None:
        found = digest(path, "md5")
        if found != md5:
            raise _Wrong(
                f"{named.name} is not the published file: its md5 is {found} and should be {md5}; "
                + (f"remove {path} and try again" if path == named else f"{url} served another, which was not kept")
            )
        return
    note = named.with_name(named.name + ".sha256")
    found = digest(path, "sha256")
    if not note.exists():
        note.write_text(f"{found}  {named.name}\n")
    elif (recorded := note.read_text().split()[0]) != found:
        raise _Wrong(f"{named.name} has changed: its sha256 is {found}, the first download had {recorded} ({note})")


def _complete(url: str, part: Path, attempts: int, timeout: float, progress: Progress) -> None:
    failures, trouble = 0, ""
    while failures < attempts:
        before = part.stat().st_size
        try:
            return _receive(url, part, timeout, progress)
        except _Broken as error:
            trouble = str(error)
            failures = 1 if part.stat().st_size > before else failures + 1  # as long as it moves, go on
    raise BadInput(
        f"the connection to {_host(url)} broke off after {part.stat().st_size} bytes ({trouble}); what came is kept in "
        f"{part}, the same command continues from there"
    )


def _receive(url: str, part: Path, timeout: float, progress: Progress) -> None:
    have = part.stat().st_size
    request = urllib.request.Request(url, headers={"User-Agent": "strata", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            total = _length(response, have)
            if have and (response.status != 206 or _range_start(response) != have):
                have, total = 0, _length(response, 0)  # the server does not resume: from the beginning
            with part.open("r+b") as file:
                file.truncate(have)
                file.seek(have)
                progress(have, total)
                while chunk := response.read1(CHUNK):  # what has come, so that a break loses nothing
                    file.write(chunk)
                    have += len(chunk)
                    progress(have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing beyond what is there: the part is whole, or of another file
            if (error.headers.get("Content-Range") or "").strip() in ("", f"bytes */{have}"):
                return
            os.truncate(part, 0)
            raise _Broken("the part there was of another file") from error
        if error.code >= 500:
            raise _Broken(f"HTTP {error.code}") from error
        raise BadInput(
            f"{url} answers HTTP {error.code} {error.reason}; fetch the file elsewhere and put it at {_final(part)}"
        ) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionResetError):
            raise _Broken(str(error.reason)) from error
        raise BadInput(_offline(url, part, error.reason)) from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _Broken(str(error) or type(error).__name__) from error
    if total is not None and have < total:
        raise _Broken(f"of {total}")


def _offline(url: str, part: Path, reason: object) -> str:
    return (
        f"cannot reach {_host(url)} ({reason}): this machine seems to be offline; fetch {url} on another, "
        f"put it at {_final(part)} and run the same command again"
    )


def _final(part: Path) -> Path:
    return part.with_name(part.name.removesuffix(".part"))


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


def _length(response: http.client.HTTPResponse, have: int) -> int | None:
    length = response.headers.get("Content-Length")
    return have + int(length) if length and length.isdigit() else None


def _range_start(response: http.client.HTTPResponse) -> int | None:
    """The 5 of `Content-Range: bytes 5-9/10`."""
    start = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def unpack(archive: Path, root: Path, folder: str, limit: int) -> Path:
    """Unpack into root/folder: only plain files below `folder` (no links, no way out), `limit` bytes at most.

    It all goes to a scratch folder first and is renamed when complete.
    """
    target = root / folder
    if target.exists():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder}.", dir=root))
    try:
        left = limit
        for name, opened in _members(archive):
            parts = name.split("/")
            if parts[0] != folder or ".." in parts or "\\" in name or "\0" in name:
                raise BadInput(f"{archive} holds {name!r}, outside of {folder}/: not the published archive")
            path = scratch.joinpath(*(part for part in parts if part not in ("", ".")))
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened as source, path.open("xb") as file:
                while chunk := source.read(CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        raise BadInput(f"{archive} unpacks to more than {limit} bytes; it is not the published archive")
                    file.write(chunk)
        if not (scratch / folder).is_dir():
            raise BadInput(f"{archive} holds no {folder}/; it is not the published archive")
        (scratch / folder).rename(target)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadInput(f"{archive} is broken or cut short ({error}); remove it and fetch it again") from error
    except OSError as error:
        if target.exists():  # another process was quicker
            return target
        raise BadInput(f"{archive} could not be unpacked to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The plain files of a tar or zip, in order. Links and devices are refused, folders follow from files."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise BadInput(f"{archive} holds a link, {info.filename!r}; it is not the published archive")
                if not info.is_dir():
                    yield info.filename, packed.open(info)
        return
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if member.isfile():
                opened = tar.extractfile(member)
                assert opened is not None
                yield member.name, opened
            elif not member.isdir():
                raise BadInput(f"{archive} holds {member.name!r}, neither file nor folder: not the published archive")
