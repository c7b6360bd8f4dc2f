"""Who may call what on the server's one port."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.fleet.security.connection_guard import LARGEST, LARGEST_OF_DEVICES, ConnectionGuard
from strata.fleet.security.tokens import Operator

HERE, OWN, THERE = ("127.0.0.1", 5), ("192.168.1.10", 5), ("192.168.1.66", 5)
SERVER = ("192.168.1.10", 8477)
RIGHT, WRONG = "Bearer sesame", "Bearer sesam"
OPERATORS = {name: Operator(name, role) for name, role in (("sesame", "run"), ("look", "watch"), ("own", "server"))}


def known(shown: str) -> Operator | None:
    return OPERATORS.get(shown)


def ask(scope: dict[str, Any], token: str | None, *parts: bytes) -> tuple[int, bytes]:
    """The status, and what the app got to read of a request that comes in these parts."""
    answers: list[dict[str, Any]] = []
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left.append({"type": "http.request", "body": b"", "more_body": False})
    got = b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        more = True
        while more:
            message = await receive()
            got += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive() -> Any:
        return left.pop(0)

    everything = len(left)
    asyncio.run(ConnectionGuard(app, None if token is None else known)(scope, receive, send))
    status = int(answers[0]["status"])
    assert status != 401 or len(left) == everything, "nothing is read of a request that is refused"
    return status, got


def status(path: str, client: tuple[str, int] | None, *authorization: str, token: str | None = "sesame") -> int:
    headers = [(b"authorization", value.encode()) for value in authorization]
    scope = {"type": "http", "path": path, "client": client, "server": SERVER, "headers": headers}
    return ask(scope, token)[0]


@pytest.mark.parametrize("client", [HERE, OWN, THERE, None])
def test_devices_and_health_from_anywhere(client: Any) -> None:
    assert status("/v1/fleet/pull-messages", client) == status("/health", client) == 200


@pytest.mark.parametrize("call", ["start-run", "stop-run", "list-nodes"])
def test_control_needs_the_token_even_here(call: str) -> None:
    path = f"/v1/control/{call}"
    assert status(path, THERE, RIGHT) == status(path, HERE, RIGHT) == 200
    for client in (HERE, THERE):
        assert status(path, client) == status(path, client, WRONG) == status(path, client, RIGHT, RIGHT) == 401
    assert status(path, HERE, "sesame") == status(path, HERE, "") == 401


def test_each_role_has_its_calls() -> None:
    changing, looking = ("start-run", "stop-run"), ("list-runs", "stream-logs", "list-nodes")
    for call in ("register-node", "unregister-node", *changing, *looking):
        path = f"/v1/control/{call}"
        own = 403 if call in changing else 200
        assert status(path, THERE, "Bearer look") == (200 if call in looking else 403)
        assert status(path, THERE, RIGHT) == (200 if call in (*changing, *looking) else 403)
        assert status(path, HERE, "Bearer own") == own and status(path, THERE, "Bearer own") == 401
    assert status("/v1/runtime/acquire-task", THERE, "Bearer look") == 401


def test_a_log_that_is_being_read_ends_when_its_token_is_revoked() -> None:
    operators = {"look": Operator("look", "watch")}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in (b"one", b"two", b"three"):
            await send({"type": "http.response.body", "body": body, "more_body": True})
            operators.pop("look", None)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append((message.get("body"), message.get("more_body")))

    headers = [(b"authorization", b"Bearer look")]
    scope = {"type": "http", "path": "/v1/control/stream-logs", "client": THERE, "server": SERVER, "headers": headers}
    asyncio.run(ConnectionGuard(app, operators.get)(scope, receive, send))
    assert sent == [(None, None), (b"one", True), (b"", False)]


@pytest.mark.parametrize("call", ["add-app", "start-automation", "begin-connector-oauth", "create-federation"])
def test_the_rest_of_control_is_closed(call: str) -> None:
    assert status(f"/v1/control/{call}", HERE, RIGHT) == 401


def test_the_runtime_is_for_this_machine() -> None:
    path = "/v1/runtime/acquire-task"
    assert status(path, HERE) == status(path, ("::1", 5)) == status(path, ("::ffff:127.0.0.1", 5)) == 200
    assert status(path, OWN) == 200  # a server that listens on one address calls itself there
    assert status(path, THERE) == status(path, THERE, RIGHT) == status(path, None) == status(path, ("evil", 5)) == 401


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/", "/v1/fleet", "/v2/control/start-run", "//v1/fleet/x"])
def test_nothing_else(path: str) -> None:
    assert status(path, HERE, RIGHT) == 401


def test_a_plain_server_asks_for_no_token() -> None:
    assert status("/v1/control/start-run", HERE, token=None) == 200
    assert status("/v1/control/add-app", HERE, token=None) == 401


def test_websockets_are_dropped() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    asyncio.run(ConnectionGuard(app, None)({"type": "websocket", "path": "/v1/fleet/x"}, app, app))  # type: ignore[arg-type]


def push(*parts: bytes, announced: int | None = None) -> tuple[int, bytes]:
    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    scope = {"type": "http", "path": "/v1/fleet/push-object", "client": THERE, "server": SERVER, "headers": headers}
    return ask(scope, "sesame", *parts)


def test_a_stranger_does_not_fill_the_memory() -> None:
    mebibyte = bytes(1 << 20)
    assert push(b"ab", b"", b"c") == push(b"ab", b"c", announced=3) == (200, b"abc")
    assert push(*[mebibyte] * 6) == (200, bytes(LARGEST_OF_DEVICES))
    assert push(*[mebibyte] * 16, b"c") == (413, b"")
    assert push(announced=LARGEST_OF_DEVICES + 1) == (413, b"")


def test_pieces_of_arrays_are_within_the_limit() -> None:
    constant = pytest.importorskip("flwr.common.constant")
    assert constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < LARGEST_OF_DEVICES - (1 << 19)
    assert constant.FAB_MAX_SIZE < LARGEST
