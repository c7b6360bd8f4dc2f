"""What strangers can take from the server before it knows them: a moment, and a little memory."""

from __future__ import annotations

import asyncio
import datetime
import resource
import socket
from base64 import b64encode
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")
import uvicorn
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from strata.fleet.security import connection_guard, connection_limits
from strata.fleet.security.connection_guard import ConnectionGuard
from strata.fleet.security.connection_limits import BytesInFlight, Places, limited
from strata.fleet.security.signatures import signer


class Links:
    """Flower's app, as far as the guard looks at it: it knows one key."""

    def __init__(self, known: bytes) -> None:
        self.state = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: self))
        self.known = known

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return 7 if key == self.known else None


def signed(key: Any, at: float = 0.0, text: str | None = None) -> list[tuple[bytes, bytes]]:
    private, public = key
    time = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=at)).isoformat()
    return [
        (b"flwr-public-key", b64encode(public_key_to_bytes(public))),
        (b"flwr-signature", b64encode(sign_message(private, (text or time).encode()))),
        (b"flwr-timestamp", time.encode()),
    ]


@pytest.fixture(scope="module")
def keys() -> list[Any]:
    return [generate_key_pairs(), generate_key_pairs()]


def test_only_registered_keys_sign(keys: list[Any]) -> None:
    own, other = keys
    app = Links(public_key_to_bytes(own[1]))

    def key_of(headers: list[tuple[bytes, bytes]], call: str = "push-object") -> bytes | None:
        return signer({"headers": headers, "app": app, "path": f"/v1/fleet/{call}"})

    assert key_of(signed(own)) == public_key_to_bytes(own[1])
    assert key_of(signed(other)) is None  # a stranger's
    assert key_of(signed(other), "activate-node") is not None  # a greeting, which Flower answers
    assert key_of(signed(other, text="another time"), "activate-node") is None
    assert key_of(signed(own, text="another time")) is None
    assert key_of(signed(own, at=-600)) is None and key_of(signed(own, at=60)) is None
    assert key_of([]) is None and key_of([(name, b"\xff?") for name, _ in signed(own)]) is None
    mixed = [signed(own)[0], *signed(other)[1:]]  # another's key with one's own signature
    assert key_of(mixed) is None


def asked(guard: ConnectionGuard, receive: Any, **scope: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "path": "/v1/fleet/push-object", "client": ("10.0.0.9", 5), "headers": [], **scope}
    asyncio.run(guard(scope, receive, send))
    return answers


async def never(*_: Any) -> Any:
    raise AssertionError("this must not be asked for")


def test_no_body_is_read_before_its_signature(keys: list[Any]) -> None:
    app = Links(public_key_to_bytes(keys[0][1]))
    guard = ConnectionGuard(never, lambda shown: None, signer)
    for headers in ([], signed(keys[1])):
        assert asked(guard, never, headers=headers, app=app)[0]["status"] == 401
    headers = [*signed(keys[1]), (b"content-length", b"4097")]
    assert asked(guard, never, headers=headers, app=app, path="/v1/fleet/activate-node")[0]["status"] == 413


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "BODY_SECONDS", 0.02)

    async def receive() -> Any:
        await asyncio.Event().wait()

    assert asked(ConnectionGuard(never, None), receive)[0]["status"] == 408


def test_requests_wait_until_there_is_room() -> None:
    async def play() -> None:
        bytes = BytesInFlight(total=10, each=6)
        order: list[str] = []
        over = asyncio.Event()

        async def one(name: str, who: str, size: int) -> None:
            async with bytes.room(who, size):
                order.append(name)
                await over.wait()

        tasks = [asyncio.create_task(one(*values)) for values in [("a", "x", 6), ("b", "x", 1), ("c", "y", 5)]]
        tasks.append(asyncio.create_task(one("d", "z", 4)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "d"]  # x has its 6; y's 5 would make 11
        over.set()
        await asyncio.gather(*tasks)
        assert sorted(order) == ["a", "b", "c", "d"] and not bytes.taken
        async with bytes.room("x", 99):  # what is too large for any bound has it for itself
            pass

    asyncio.run(play())


def test_places_by_address_and_in_all() -> None:
    places = Places(total=3, each=2)
    assert [places.take(address) for address in "aaabb"] == [True, True, False, True, False]
    places.leave("a")
    assert places.take("b") and places.taken == {"a": 1, "b": 2}


def test_descriptors_up_to_the_systems_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: made.append(values))
    assert connection_limits.raise_descriptors() == 4096 and made == [(4096, 4096)]


# --- on a real port ------------------------------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.2)
    opened: list[socket.socket] = []
    yield opened
    for one in opened:
        one.close()


def test_who_says_nothing_is_cut_off(connections: list[socket.socket]) -> None:
    """Also in the middle of headers, by endless ones, and beyond the places of an address; a request is answered."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def read(one: socket.socket) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 100), 60)

    async def play() -> None:
        places = Places(total=100, each=4)
        config = uvicorn.Config(
            app, port=0, log_level="critical", lifespan="off", http=limited(AutoHTTPProtocol, places)
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connection(text: bytes) -> socket.socket:
            one = socket.socket()
            one.setblocking(False)
            connections.append(one)
            await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(one, text)
            return one

        silent = await connection(b"")
        slow = await connection(b"GET / HTTP/1.1\r\nHost: a\r\n")
        endless = await connection(b"GET / HTTP/1.1\r\nHost: " + b"a" * 70_000)
        for one in (silent, slow, endless):
            with pytest.raises(ConnectionResetError):
                if not await read(one):
                    raise ConnectionResetError
        assert not places.taken
        honest = await connection(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await read(honest)).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await serving

    asyncio.run(play())
