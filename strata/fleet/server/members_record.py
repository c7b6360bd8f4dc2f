"""Who joins a run and who leaves it, for the audit log: the server app knows, and is told where the log is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from strata.fleet.security.audit import AUDIT, AuditLog
from strata.fleet.security.signatures import fingerprint

Told = Callable[[str, str, bytes], None]  # what happened, the device's name, and its key where it is there


def members_record(run: int) -> Told | None:
    """None on a plain-text server, which has no audit log."""
    folder = os.environ.get(AUDIT)
    if folder is None:
        return None
    log = AuditLog(Path(folder), partial(print, flush=True))

    def told(what: str, name: str, key: bytes) -> None:
        log.record(what, run=str(run), device=name, **({"key": fingerprint(key)} if key else {}))

    return told
