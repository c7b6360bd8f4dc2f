"""The door of the server's port.

Flower serves three interfaces on one port and asks for proof on one of them: the fleet interface, where devices sign
every request. Through the control interface anybody could register a key or start a run with code of their own;
through the runtime interface anybody could take the server app's work. So in front of them:
    /v1/fleet/    whose headers a registered device has signed (a greeting: whoever has signed it); Flower checks the
                  signature again, with the body
    /health       anybody
    /v1/control/  whoever shows an operator's token, and of it only what that one may do (tokens.py)
    /v1/runtime/  this machine, where the server app runs
    the rest      nobody
Flower reads a request whole before it asks who sent it, however long it is and takes. So nobody's body is read before
it is known whose it is; none may be longer than it needs to be, or take for ever, and all of them have bounds together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, Hashable, MutableMapping
from typing import Any

from strata.fleet.security.audit import AuditLog
from strata.fleet.security.connection_limits import BytesInFlight
from strata.fleet.security.door_record import CHANGES, NOTES, DoorRecord, noting
from strata.fleet.security.signatures import GREETINGS
from strata.fleet.security.tokens import CALLS, SERVER, Known, Operator

HEALTH, DEVICES = "/health", "/v1/fleet/"
CONTROL = {f"/v1/control/{call}": call for calls in CALLS.values() for call in calls}
BEARER = b"Bearer "
NOT_BY_ROLE = "This is not for a token of the role {role}."
LARGEST = 16 << 20  # bytes of a request; Flower takes bundles of at most 10 MiB
LARGEST_OF_DEVICES = 6 << 20  # of theirs; Flower sends arrays in pieces of 5 MiB
LARGEST_GREETING = 4 << 10  # of anybody who has a key, registered or not
LONGEST_NUMBER = 20  # digits
BODY_SECONDS = 300.0  # for it to come: 5 MiB over 20 kB/s

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ConnectionGuard:
    """ASGI middleware. `known`: whose token is shown; None: none is asked for (a plain-text server on loopback).
    `signer`: the key that signed a device's request; None: nobody signs there. `audit`: for who came, and for what."""

    def __init__(
        self,
        app: Application,
        known: Known | None,
        signer: Callable[[Scope], bytes | None] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.app = app
        self.known = known
        self.signer = signer
        self.record = DoorRecord(audit)
        self.in_flight = BytesInFlight()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return await self.record.tidy(now=True)  # after the last request
        if scope["type"] != "http":
            return None
        await self.record.tidy()
        operator = self.operator(scope)
        if not self.admits(scope, operator):
            await _refuse(send, 401, "This needs an operator's token, or another place.")
            return await self.record.refused(scope, "no token, a wrong one, or another place")
        token = None if operator is None else operator.name
        if operator is not None and not operator.may(CONTROL[scope["path"]]):
            await _refuse(send, 403, NOT_BY_ROLE.format(role=operator.role))
            return await self.record.refused(scope, f"not for the role {operator.role}", token)
        key: bytes | None = None
        if self.signer is not None and str(scope["path"]).startswith(DEVICES):
            key = await asyncio.to_thread(self.signer, scope)
            if key is None:
                await _refuse(send, 401, "No registered device has signed this.")
                return await self.record.refused(scope, "not signed by a registered device")
        if operator is not None and operator.role != SERVER and scope["path"] not in CHANGES:
            await self.record.looked(scope, token)
        seen: dict[str, Any] = {"status": 500}
        notes: dict[str, Any] = {}
        NOTES.set(notes)
        try:
            allowed = send if operator is None else self._while_known(scope, send)
            await self._pass(scope, key, receive, noting(allowed, seen))
        finally:
            await self.record.answered(scope, seen["status"], token=token, key=key, notes=notes)
        return None

    async def _pass(self, scope: Scope, key: bytes | None, receive: Receive, send: Send) -> None:
        who: Hashable = key or (scope["client"][0] if scope.get("client") else None)
        try:
            size = _announced(scope)
            async with self.in_flight.room(who, size):
                body = await _body(receive, size)
                if body is not None:
                    await self.app(scope, _with(body, receive), send)
        except TooLarge:
            await _refuse(send, 413, f"This request has at most {_largest(scope)} bytes.")
        except TooLate:
            await _refuse(send, 408, f"A request is sent within {BODY_SECONDS:g} s.")

    def admits(self, scope: Scope, operator: Operator | None) -> bool:
        path = str(scope["path"])
        if path == HEALTH or path.startswith(DEVICES):
            return True
        if path in CONTROL:
            return self.known is None or operator is not None
        return path.startswith("/v1/runtime/") and _same_machine(scope)

    def operator(self, scope: Scope) -> Operator | None:
        """Whose token is shown, where one is asked for. The server's own is shown on its own machine only."""
        if self.known is None or scope["path"] not in CONTROL:
            return None
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) != 1 or not shown[0].startswith(BEARER):
            return None
        operator = self.known(shown[0].removeprefix(BEARER).decode("latin-1"))
        return operator if operator is None or operator.role != SERVER or _same_machine(scope) else None

    def _while_known(self, scope: Scope, send: Send) -> Send:
        """An answer that takes as long as a run, its log, ends when the token is revoked."""
        ended = False

        async def send_allowed(message: MutableMapping[str, Any]) -> None:
            nonlocal ended
            if not ended and message["type"] == "http.response.body" and self.operator(scope) is None:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not ended:
                await send(message)

        return send_allowed


class TooLarge(Exception):
    pass


class TooLate(Exception):
    pass


def _largest(scope: Scope) -> int:
    path = str(scope["path"])
    if path == HEALTH:
        return 0
    if path in GREETINGS:
        return LARGEST_GREETING
    return LARGEST_OF_DEVICES if path.startswith(DEVICES) else LARGEST


def _announced(scope: Scope) -> int:
    """How long the body is to be; the most that it may be where that is not said."""
    largest = _largest(scope)
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    if lengths and len(lengths[0]) > LONGEST_NUMBER:  # Python makes no number of thousands of digits
        raise TooLarge
    announced = int(lengths[0]) if lengths and lengths[0].isdigit() else largest
    if announced > largest:
        raise TooLarge
    return announced


async def _body(receive: Receive, size: int) -> bytes | None:
    """The whole of it; None: the client has gone. It is counted even where a length is announced."""
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > size:
                    raise TooLarge
                more = message.get("more_body", False)
    except TimeoutError:
        raise TooLate from None
    return bytes(body)


def _with(body: bytes, receive: Receive) -> Receive:
    """First the body, then whatever comes."""
    waiting = [body]

    async def next_message() -> MutableMapping[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return next_message


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of the request is not read
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _same_machine(scope: Scope) -> bool:
    """From loopback, or from the very address that was called: no other machine can have either."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    return _loopback(client[0]) or (server is not None and client[0] == server[0])


def _loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
