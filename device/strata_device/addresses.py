"""Where the server is, as the user writes it."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from strata_device.errors import BadInput

DEFAULT_PORT = 8477


class Address(NamedTuple):
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
