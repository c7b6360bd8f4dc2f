"""Addresses as the user writes them, and what is found there: each failure in one sentence, before Flower starts."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from strata.core.errors import BadInput

DEFAULT_PORT = 8477
PATIENCE = 10.0  # seconds for one connection


class Unreachable(BadInput):
    """Nobody answers there now; perhaps later."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may resolve to anything

    @property
    def local(self) -> Address:
        """Where this machine finds a server that listens here."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return Address(everywhere.get(self.host, self.host), self.port)


def parse_address(text: str) -> Address:
    """HOST, HOST:PORT or [IPV6]:PORT."""
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else port if not rest else "?"
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not _may_be_host(host) or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise BadInput(f"a server is written HOST:PORT, such as 192.168.1.10:{DEFAULT_PORT}, not {text!r}")
    return Address(host, int(port))


def _may_be_host(text: str) -> bool:
    """Python cannot even look for a machine with an empty or overlong label in its name."""
    try:
        return bool(text.encode("idna")) and "/" not in text
    except UnicodeError:
        return False


def need_loopback(address: Address) -> None:
    if not address.loopback:
        raise BadInput(
            f"--insecure sends everything in plain text and is for this machine alone, not for {address.host}: "
            "use localhost, or make keys with `strata fleet keys`"
        )


def need_free(address: Address) -> None:
    """The port can be listened on now."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
    except PermissionError:
        raise BadInput(f"this user may not listen on port {address.port}: choose one above 1023") from None
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == 99:  # EADDRNOTAVAIL
            raise BadInput(
                f"{address.host} is not an address of this machine: use one of its own, or 0.0.0.0"
            ) from None
        raise BadInput(
            f"port {address.port} of {address.host} is in use: end the program that has it, or choose another --port"
        ) from None


def free_port() -> int:
    """One of this machine's own that nobody has now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def need_server(address: Address, authority: Path | None) -> None:
    """A server answers there, and is the one of this certificate authority (None: in plain text)."""
    try:
        with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
            if authority is None:
                _need_plain(connection, address)
            else:
                with _context(authority).wrap_socket(connection, server_hostname=address.host):
                    pass
    except ssl.SSLCertVerificationError as error:
        if "IP address mismatch" in error.verify_message or "ostname mismatch" in error.verify_message:
            raise BadInput(
                f"the server's certificate is not for {address.host}: use a name that it is for, or make another with "
                f"`strata fleet keys KEYS --renew --host {address.host}`"
            ) from None
        raise BadInput(
            f"the server at {address} is not the one of {authority} ({error.verify_message}): "
            "copy the ca.pem of the server's own key folder"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # a server that is about to end, or a gateway before one
        raise Unreachable(_nobody(address, "the connection was closed")) from None
    except ssl.SSLError:
        raise BadInput(
            f"{address} does not speak TLS: is it another program's port, or a server with --insecure?"
        ) from None
    except socket.gaierror:
        raise Unreachable(f"there is no machine called {address.host}: check the name, or use its address") from None
    except OSError as error:
        raise Unreachable(_nobody(address, (error.strerror or str(error) or "timed out").lower())) from None


def _nobody(address: Address, why: str) -> str:
    return f"no server answers at {address} ({why}): is `strata fleet server` running there, and the port open?"


def _context(authority: Path) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority)
    except (ssl.SSLError, ValueError):
        raise BadInput(f"{authority} is not a certificate: copy ca.pem from the server's key folder") from None
    return context


def _need_plain(connection: socket.socket, address: Address) -> None:
    try:
        connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = connection.recv(16)
    except ConnectionError:
        answer = b""
    if not answer.startswith(b"HTTP/"):
        raise BadInput(
            f"{address} gives no answer in plain text: if it speaks TLS, leave --insecure out and give --keys"
        )
