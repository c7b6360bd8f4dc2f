"""Operators' tokens: who may do what at the server's control interface.

operator.token       of the one called operator, who may run and watch
tokens/NAME.json     role and SHA-256 of NAME's token: the server compares, so it need not have the token
operators/NAME/      what NAME needs, ca.pem and operator.token: to be taken there, and away from here

A token is 256 random bits, so that its plain hash gives nothing away. The files are looked at with every request: a
token that is made, replaced or revoked counts at once.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import write_new
from strata.core.paths import writing_to
from strata.fleet.protocol.settings import NAME
from strata.fleet.security.keys import KeyFolder, need_file

OPERATOR, SERVER = "operator", "server"
WATCH = frozenset({"list-runs", "stream-logs", "list-nodes"})
CALLS = {
    "watch": WATCH,
    "run": WATCH | {"start-run", "stop-run"},
    "server": WATCH | {"register-node", "unregister-node"},  # the server's own launcher, and nobody else
}
ROLES = ("run", "watch")
LARGEST = 4 << 10  # bytes of a file


@dataclass(frozen=True)
class Operator:
    name: str
    role: str

    def may(self, call: str) -> bool:
        return call in CALLS[self.role]


Known = Callable[[str], Operator | None]  # whose token this is


@dataclass(frozen=True)
class TokenRecord:
    operator: Operator
    sha256: str
    made: str


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    return secrets.token_urlsafe(32)


class TokenFile:
    """operator.token as it is now: it may be replaced while the server runs (`strata fleet rotate token`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None
        self._text = ""
        if not self.text():
            raise BadInput(f"{path} is empty: make another token with `strata fleet rotate token`")

    def text(self) -> str:
        """What was read last, where it cannot be read now."""
        with contextlib.suppress(OSError, UnicodeError):
            status = self.path.stat()
            if self._seen != (status.st_ino, status.st_mtime_ns):
                self._text = self.path.read_text().strip() or self._text
                self._seen = (status.st_ino, status.st_mtime_ns)
        return self._text


class Tokens:
    """All that a server takes. `own`: the SHA-256 of the token of its launcher."""

    def __init__(self, folder: KeyFolder, own: str) -> None:
        self._folder, self._own = folder, own
        self._single = TokenFile(folder.token)
        self._seen: object = None
        self._named: list[TokenRecord] = []

    def of(self, shown: str) -> Operator | None:
        """Whose it is. All are compared, whichever it is."""
        digest = digest_of(shown)
        known = [(Operator(SERVER, "server"), self._own), (Operator(OPERATOR, "run"), digest_of(self._single.text()))]
        known += [(record.operator, record.sha256) for record in self._records()]
        found = [operator for operator, expected in known if hmac.compare_digest(digest, expected)]
        return found[0] if found else None

    def _records(self) -> list[TokenRecord]:
        """What was read last, where the folder cannot be read now; none where there is no folder."""
        try:
            seen = [(entry.name, entry.stat().st_ino, entry.stat().st_mtime_ns) for entry in _files(self._folder)]
            if seen != self._seen:
                self._named = records(self._folder)
                self._seen = seen
        except FileNotFoundError:  # a file that was removed just now, too: it is looked for again next time
            self._named, self._seen = records(self._folder), None
        except OSError:
            pass
        return self._named


def _files(folder: KeyFolder) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder.tokens) as entries:
            return sorted((entry for entry in entries if entry.name.endswith(".json")), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def records(folder: KeyFolder) -> list[TokenRecord]:
    """Of named tokens. A file that is not as we write it is nobody's token."""
    found = [_record(Path(entry.path)) for entry in _files(folder)]
    return [record for record in found if record is not None]


def _record(path: Path) -> TokenRecord | None:
    try:
        with path.open("rb") as file:
            value: Any = json.loads(file.read(LARGEST))
        role, sha256 = value["role"], value["sha256"]
        int(sha256, 16)
        if role in ROLES and len(sha256) == 64 and sha256.isascii() and NAME.fullmatch(path.stem):
            return TokenRecord(Operator(path.stem, role), sha256, str(value.get("made", ""))[:32])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def make_token(folder: KeyFolder, name: str, role: str) -> Path:
    """The folder that the operator needs. The token is nowhere else."""
    if not NAME.fullmatch(name) or name in (OPERATOR, SERVER):
        raise BadInput(
            f"an operator's name is 1 to 64 letters, digits, dots, dashes or underscores, and not {OPERATOR} or "
            f"{SERVER}: not {name!r}"
        )
    for path in (folder.authority, folder.certificate, folder.token):
        need_file(path, "give the key folder on the server, which `strata fleet keys` made")
    place, record = folder.operator(name), folder.tokens / f"{name}.json"
    if record.exists() or place.exists():
        raise BadInput(
            f"{name} has a token already: choose another name, or revoke it with "
            f"`strata fleet token {name} --revoke --keys {folder.path}`"
        )
    token = new_token()
    with writing_to(folder.path):
        making = place.with_name(f".{name}.new")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700, parents=True)
        write_new(making / folder.token.name, token.encode() + b"\n")
        write_new(making / folder.authority.name, folder.authority.read_bytes(), 0o644)
        making.rename(place)
        folder.tokens.mkdir(mode=0o700, exist_ok=True)
        value = {"role": role, "sha256": digest_of(token), "made": _today()}
        new = record.with_name(f".{name}.new")
        new.unlink(missing_ok=True)
        write_new(new, json.dumps(value).encode() + b"\n")
        new.rename(record)  # whole or not at all: the server may look at any time
    return place


def revoke_token(folder: KeyFolder, name: str) -> None:
    if name == OPERATOR:
        raise BadInput("operator.token is replaced, not revoked: `strata fleet rotate token`")
    there = [record.operator.name for record in records(folder)]
    path = folder.tokens / f"{name}.json"
    if not NAME.fullmatch(name) or not path.exists():
        raise BadInput(f"no operator {name} has a token in {folder.path}: there are {', '.join(there) or 'none'}")
    with writing_to(folder.path):
        path.unlink()
        shutil.rmtree(folder.operator(name), ignore_errors=True)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
