"""What the guard of the server's port writes into the audit log: who came, from where, for what, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

from strata.fleet.security.audit import AuditLog, Repeated
from strata.fleet.security.signatures import GREETINGS, fingerprint, registered_name

CONNECT, LEAVE = "/v1/fleet/activate-node", "/v1/fleet/deactivate-node"
# what operators may change by the control interface; of devices, the server's launcher writes (server/admission.py)
CHANGES = {
    "/v1/control/start-run": "run started",
    "/v1/control/stop-run": "run stopped",
}
NOTES: ContextVar[dict[str, Any] | None] = ContextVar("strata_audit_notes", default=None)


def note(**facts: Any) -> None:
    """What the handler of a request knows of it, and its door does not: which run it began."""
    notes = NOTES.get()
    if notes is not None:
        notes.update(facts)


class DoorRecord:
    """`log` None: nothing is written (a plain-text server knows nobody)."""

    def __init__(self, log: AuditLog | None) -> None:
        self._log = log
        self._repeated = None if log is None else Repeated(log)
        # One of its own: a disk that hangs must not take the threads that check signatures.
        self._thread = ThreadPoolExecutor(1, "strata-audit")
        self._tidying: Future[None] = Future()
        self._tidying.set_result(None)

    async def _apart(self, write: Callable[..., None], *arguments: Any, **facts: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, partial(write, *arguments, **facts))

    async def tidy(self, now: bool = False) -> None:
        """Writes what was counted for a while, which nobody waits for; `now`: the server ends."""
        if self._repeated is None:
            return
        if now:
            await self._apart(self._repeated.flush, now)
        elif self._repeated.due and self._tidying.done():
            self._tidying = self._thread.submit(self._repeated.flush)

    async def refused(self, scope: Mapping[str, Any], why: str, token: str | None = None) -> None:
        if self._repeated is not None:
            facts = {"token": token, "from": _address(scope), "path": str(scope["path"]), "why": why}
            await self._apart(self._repeated.record, "refused", **facts)

    async def looked(self, scope: Mapping[str, Any], token: str | None) -> None:
        """Whoever may see the fleet's devices, runs and logs did so."""
        if self._repeated is not None:
            facts = {"token": token, "from": _address(scope)}
            await self._apart(self._repeated.record, "looked", **facts)

    async def answered(
        self, scope: Mapping[str, Any], status: int, *, token: str | None, key: bytes | None, notes: Mapping[str, Any]
    ) -> None:
        path = str(scope["path"])
        if self._log is None:
            return
        if path in CHANGES:
            facts = {"token": token, "from": _address(scope), **notes}
            if status >= 400:
                facts["failed"] = status
            await self._apart(self._log.record, CHANGES[path], **facts)
        elif key is not None and (path in GREETINGS or path == LEAVE):
            await self._apart(self._device, scope, path, status, key)

    def _device(self, scope: Mapping[str, Any], path: str, status: int, key: bytes) -> None:
        assert self._repeated is not None
        facts = {"device": registered_name(scope, key), "key": fingerprint(key), "from": _address(scope)}
        if status >= 400:
            self._repeated.record("device refused", **facts)
        elif path in (CONNECT, LEAVE):
            self._repeated.record("device connected" if path == CONNECT else "device left", **facts)


def noting(send: Callable[[Any], Any], seen: dict[str, Any]) -> Callable[[Any], Any]:
    """`send`, which leaves the status of the answer in `seen`."""

    async def send_noting(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen["status"] = message["status"]
        await send(message)

    return send_noting


def _address(scope: Mapping[str, Any]) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""
