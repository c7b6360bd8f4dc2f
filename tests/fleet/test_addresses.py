"""Addresses, and one sentence for each thing that can be wrong at the other end."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from strata.core.errors import BadInput
from strata.fleet.security.addresses import Address, Unreachable, need_free, need_loopback, need_server, parse_address
from strata.fleet.security.certificates import make_authority, make_server
from tests.fleet.processes import free_port


@pytest.mark.parametrize(
    "text, host, port",
    [
        ("10.0.0.1:9000", "10.0.0.1", 9000), ("fleet.local", "fleet.local", 8477), ("[::1]:9", "::1", 9),
        ("::1", "::1", 8477), ("[fe80::1]", "fe80::1", 8477),
    ],
)  # fmt: skip
def test_reading(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    "text", ["", ":9", "a:b", "a:0", "a:65536", "https://a:9", "[::1]9", "[::1]:x", "a:-1", "a..b:9"]
)
def test_misread(text: str) -> None:
    with pytest.raises(BadInput, match="a server is written HOST:PORT"):
        parse_address(text)


def test_plain_text_stays_here() -> None:
    for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1"):
        need_loopback(Address(host, 1))
    for host in ("0.0.0.0", "::", "192.168.1.10", "example.org", "127.0.0.1.example.org"):
        with pytest.raises(BadInput, match="--insecure sends everything in plain text"):
            need_loopback(Address(host, 1))


def test_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadInput, match="is in use: end the program"):
            need_free(Address("127.0.0.1", other.getsockname()[1]))
    with pytest.raises(BadInput, match="is not an address of this machine"):
        need_free(Address("203.0.113.7", free_port()))
    need_free(Address("127.0.0.1", free_port()))


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", server.getsockname()[1])
        thread.join(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; ours has signed a certificate for this machine, and one for another."""
    folder = tmp_path_factory.mktemp("keys")
    ours, theirs = make_authority(), make_authority()
    (folder / "ours.pem").write_bytes(ours.certificate)
    (folder / "theirs.pem").write_bytes(theirs.certificate)
    signed = make_server(ours, ())
    (folder / "server.pem").write_bytes(signed.certificate)
    (folder / "server.key").write_bytes(signed.key)
    return folder


def tls(folder: Path) -> Callable[[socket.socket], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ssl.SSLError):
            context.wrap_socket(connection, server_side=True).close()

    return answer


def http(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_the_right_server(folder: Path) -> None:
    with listening(tls(folder)) as address:
        need_server(address, folder / "ours.pem")
    with listening(http) as address:
        need_server(address, None)


def test_another_authority(folder: Path) -> None:
    with listening(tls(folder)) as address, pytest.raises(BadInput, match="is not the one of .*theirs.pem"):
        need_server(address, folder / "theirs.pem")


def test_another_name(folder: Path) -> None:
    with listening(tls(folder)) as address:
        with pytest.raises(BadInput, match="certificate is not for 127.0.0.2: .*--renew --host 127.0.0.2"):
            with socket.create_server(("127.0.0.2", 0)) as server:  # the same certificate at another address
                thread = threading.Thread(target=lambda: tls(folder)(server.accept()[0]), daemon=True)
                thread.start()
                need_server(Address("127.0.0.2", server.getsockname()[1]), folder / "ours.pem")
        need_server(address, folder / "ours.pem")


def test_plain_where_tls_is_wanted_and_the_reverse(folder: Path) -> None:
    with listening(http) as address, pytest.raises(BadInput, match="does not speak TLS"):
        need_server(address, folder / "ours.pem")
    with listening(tls(folder)) as address, pytest.raises(BadInput, match="if it speaks TLS, leave --insecure out"):
        need_server(address, None)


def test_nobody_there(folder: Path) -> None:
    with pytest.raises(Unreachable, match="no server answers at 127.0.0.1:.*connection refused"):
        need_server(Address("127.0.0.1", free_port()), folder / "ours.pem")
    with pytest.raises(Unreachable, match="there is no machine called nowhere.invalid"):
        need_server(Address("nowhere.invalid", 1), None)


def test_somebody_who_hangs_up(folder: Path) -> None:
    """A server on its way down, or a gateway whose server is away: worth another try."""

    def hang_up(connection: socket.socket) -> None:
        connection.recv(1000)

    with listening(hang_up) as address, pytest.raises(Unreachable, match="the connection was closed"):
        need_server(address, folder / "ours.pem")
    with listening(lambda connection: None) as address, pytest.raises(Unreachable):  # reset, or closed
        need_server(address, folder / "ours.pem")


def test_a_file_that_is_no_certificate(folder: Path) -> None:
    with listening(http) as address, pytest.raises(BadInput, match="server.key is not a certificate"):
        need_server(address, folder / "server.key")
