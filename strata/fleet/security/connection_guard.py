"""The door of the server's port.

Flower serves three interfaces on one port and asks for proof on one of them: the fleet interface, where devices sign
every request. Through the control interface anybody could register a key or start a run with code of their own;
through the runtime interface anybody could take the server app's work. So in front of them:
    /v1/fleet/    anybody: Flower checks the device's signature
    /health       anybody
    /v1/control/  whoever shows the operator's token, and of it only what `strata fleet` needs
    /v1/runtime/  this machine, where the server app runs
    the rest      nobody
Flower reads a request whole before it asks who sent it, however long it is. So none may be longer than it needs to be.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

DEVICES = "/v1/fleet/"
CONTROL = frozenset(
    f"/v1/control/{call}"
    for call in ("start-run", "stop-run", "list-runs", "stream-logs", "list-nodes", "register-node", "unregister-node")
)
LARGEST = 16 << 20  # bytes of a request; Flower takes bundles of at most 10 MiB
LARGEST_OF_DEVICES = 6 << 20  # of theirs; Flower sends arrays in pieces of 5 MiB

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ConnectionGuard:
    """ASGI middleware. `token` None: no operator's token is asked for (a plain-text server on loopback)."""

    def __init__(self, app: Application, token: str | None) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        if not self.admits(scope):
            return await _refuse(send, 401, "This needs the operator's token, or another place.")
        try:
            body = await _body(scope, receive)
        except TooLarge:
            return await _refuse(send, 413, f"This request has at most {_largest(scope)} bytes.")
        return None if body is None else await self.app(scope, _with(body, receive), send)

    def admits(self, scope: Scope) -> bool:
        path = str(scope["path"])
        if path == "/health" or path.startswith(DEVICES):
            return True
        if path in CONTROL:
            return self.token is None or self._shows_token(scope)
        return path.startswith("/v1/runtime/") and _same_machine(scope)

    def _shows_token(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        expected = f"Bearer {self.token}".encode()
        return len(shown) == 1 and hmac.compare_digest(shown[0], expected)


class TooLarge(Exception):
    pass


def _largest(scope: Scope) -> int:
    return LARGEST_OF_DEVICES if str(scope["path"]).startswith(DEVICES) else LARGEST


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole of it; None: the client has gone. It is counted even where a length is announced."""
    largest = _largest(scope)
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    if any(value.isdigit() and int(value) > largest for value in announced):
        raise TooLarge
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > largest:
            raise TooLarge
        more = message.get("more_body", False)
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
