"""TLS handshakes on a real port: who begins many and ends none is bounded, and honest ones get through."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from strata.fleet.security import handshakes
from strata.fleet.security.connection_limits import Places, limited
from strata.fleet.security.handshakes import loop_of_handshakes
from strata.fleet.security.keys import KeyFolder, make_keys

MANY = 3


async def app(scope: Any, receive: Any, send: Any) -> None:
    body = f"{scope['scheme']} {scope['client'][0]}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(params=["uvloop", "asyncio"])
def served(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, KeyFolder]]:
    """A server as Flower starts it, with few places and little patience."""
    monkeypatch.setattr(handshakes, "PER_ADDRESS", MANY)
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", 2.0)
    if request.param == "asyncio":
        monkeypatch.setitem(__import__("sys").modules, "uvloop", None)
    else:
        pytest.importorskip("uvloop")
    folder = make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"], False).folder
    config = uvicorn.Config(
        app, port=0, log_level="critical", lifespan="off", http=limited(AutoHTTPProtocol, Places(100)),
        ssl_certfile=str(folder.certificate), ssl_keyfile=str(folder.key),
    )  # fmt: skip
    server = uvicorn.Server(config)
    loop = loop_of_handshakes()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()))
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    yield server.servers[0].sockets[0].getsockname()[1], folder
    server.should_exit = True
    thread.join(60)
    loop.close()


def connection(port: int, own: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30, source_address=(own, 0))


def asked(port: int, folder: KeyFolder, own: str = "127.0.0.1") -> bytes:
    context = ssl.create_default_context(cafile=str(folder.authority))
    with (
        connection(port, own) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := secured.recv(1000):
            answer += part
        return answer


def ended(one: socket.socket) -> bool:
    one.settimeout(30)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_handshakes_are_bounded_by_address_and_time(served: tuple[int, KeyFolder]) -> None:
    port, folder = served
    for _ in range(2 * MANY):  # one after another they are no trouble
        answer = asked(port, folder, "127.0.0.2")
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"https 127.0.0.2")
    silent = [connection(port, "127.0.0.2") for _ in range(MANY)]
    try:
        with closing(connection(port, "127.0.0.2")) as further:
            assert ended(further)
        assert asked(port, folder).startswith(b"HTTP/1.1 200")  # others are no worse off
        assert all(map(ended, silent))  # after a while
    finally:
        for one in silent:
            one.close()
    with closing(connection(port, "127.0.0.2")) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with suppress(ConnectionResetError):
            while rubbish.recv(100):
                pass
    assert asked(port, folder, "127.0.0.2").startswith(b"HTTP/1.1 200")  # their places are free again


def test_without_tls_nothing_is_counted() -> None:
    loop = loop_of_handshakes()

    async def serve() -> None:
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        server.close()
        await server.wait_closed()

    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()
