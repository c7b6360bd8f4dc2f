"""The key folder: made once by whoever runs the fleet, added to later, never overwritten.

ca.pem, ca.key            the fleet's own certificate authority; ca.key can be kept offline
server.pem, server.key    the server's certificate and key
operator.token            whoever has it may start and stop runs
tokens/, operators/       further operators' (tokens.py)
registered/NAME.pub       devices the server admits
revoked/                  those it shuts out for good (revocation.py)
devices/NAME/             what device NAME needs: ca.pem and device.key
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.core.files import write_new
from strata.core.paths import writing_to
from strata.fleet.environment import require_flower
from strata.fleet.protocol.settings import NAME

if TYPE_CHECKING:
    from strata.fleet.security.certificates import CertificateAndKey

KEY_FOLDER = "STRATA_KEY_FOLDER"  # in a server app's environment: where the key is that it signs programs with
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?)*")


@dataclass(frozen=True)
class KeyFolder:
    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca.pem"

    @property
    def authority_key(self) -> Path:
        return self.path / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.path / "server.pem"

    @property
    def key(self) -> Path:
        return self.path / "server.key"

    @property
    def token(self) -> Path:
        return self.path / "operator.token"

    @property
    def registered(self) -> Path:
        return self.path / "registered"

    @property
    def revoked(self) -> Path:
        return self.path / "revoked"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    def operator(self, name: str) -> Path:
        return self.path / "operators" / name

    def device(self, name: str) -> DeviceKeys:
        return DeviceKeys(self.path / "devices" / name)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.registered.glob("*.pub"))

    def check_server(self) -> None:
        """All that a server needs is there."""
        for path in (self.authority, self.certificate, self.key, self.token):
            need_file(path, f"make the keys with `strata fleet keys {self.path} --host NAME --devices N`")


@dataclass(frozen=True)
class DeviceKeys:
    """A device's own folder."""

    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca.pem"

    @property
    def key(self) -> Path:
        return self.path / "device.key"

    @property
    def name(self) -> str:
        return self.path.name


def device_keys(path: Path, name: str | None) -> DeviceKeys:
    """From the device's own folder, from the key in it, or from the whole key folder and a name."""
    if os.path.isfile(path):  # unlike Path's, these are False for what cannot be a path: need_file says why
        path = path.parent
    if os.path.isdir(path / "devices") and not os.path.exists(path / "device.key"):
        if name is None:
            there = ", ".join(KeyFolder(path).names()) or "none"
            raise BadInput(f"{path} holds the keys of several devices: say with --name which this is (there: {there})")
        path = path / "devices" / name
    keys = DeviceKeys(path.absolute())
    for file in (keys.key, keys.authority):
        need_file(file, "copy the device's folder from the one that `strata fleet keys` made")
    return keys


def need_file(path: Path, remedy: str) -> None:
    try:
        if not path.is_file():
            raise BadInput(f"there is no file {path}: {remedy}")
    except OSError as error:  # the name is too long, or a folder above may not be entered
        raise BadInput(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path} cannot be read by this user: run as its owner, or give the file to this user")


@dataclass(frozen=True)
class NewKeys:
    """What a call of make_keys wrote."""

    folder: KeyFolder
    new_fleet: bool
    new_certificate: bool
    devices: tuple[str, ...]


def make_keys(path: Path, hosts: Sequence[str], devices: Sequence[str], renew: bool = False) -> NewKeys:
    """A new key folder, or further devices (or, with `renew`, a new server certificate) in one that is there."""
    require_flower()
    for host in hosts:
        _check_host(host)
    folder = KeyFolder(path)
    with writing_to(path):
        exists = folder.authority.exists()
        names = _check(folder, exists, hosts, devices, renew)  # before anything is written
        if not exists:
            _make_fleet(folder, hosts)
        elif renew:
            make_certificate(folder, _authority(folder), hosts)
        for name in names:
            make_device_keys(folder, name)
    return NewKeys(folder, not exists, renew or not exists, tuple(names))


def _check(folder: KeyFolder, exists: bool, hosts: Sequence[str], devices: Sequence[str], renew: bool) -> list[str]:
    """That what is asked for can be done; the names of the new devices."""
    path = folder.path
    if not exists and path.is_dir() and any(path.iterdir()):
        raise BadInput(
            f"{path} holds other files and no fleet's keys, or not all of them: choose a new folder, or empty this one"
        )
    if exists and hosts and not renew:
        raise BadInput(f"{path} has a server certificate: give --renew for another one with these names")
    if exists and not devices and not renew:
        raise BadInput(
            f"{path} holds a fleet's keys already: add devices with --devices, or a certificate with --renew"
        )
    names = _new_names(folder, devices)
    if exists:
        need_file(folder.authority, "it is the fleet's certificate authority")
    if exists and renew:
        need_file(folder.authority_key, "the certificate authority's key is needed to sign another certificate")
    if exists and names and not folder.registered.is_dir():
        raise BadInput(f"{path} is a copy of a few of a fleet's keys: add devices to the key folder on the server")
    return names


def _make_fleet(folder: KeyFolder, hosts: Sequence[str]) -> None:
    from strata.fleet.security.certificates import make_authority

    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = make_authority()
    write_new(folder.authority_key, authority.key)
    write_new(folder.token, secrets.token_urlsafe(32).encode() + b"\n")
    folder.registered.mkdir()
    (folder.path / "devices").mkdir(mode=0o700)
    make_certificate(folder, authority, hosts)
    replace_file(folder.authority, authority.certificate, 0o644)  # last: it says that the folder is whole


def make_certificate(folder: KeyFolder, authority: CertificateAndKey, hosts: Sequence[str]) -> None:
    from strata.fleet.security.certificates import make_server

    signed = make_server(authority, tuple(hosts) or _hosts_now(folder))
    replace_file(folder.key, signed.key)
    replace_file(folder.certificate, signed.certificate, 0o644)


def _authority(folder: KeyFolder) -> CertificateAndKey:
    from strata.fleet.security.certificates import CertificateAndKey

    return CertificateAndKey(folder.authority.read_bytes(), folder.authority_key.read_bytes())


def _hosts_now(folder: KeyFolder) -> tuple[str, ...]:
    from strata.fleet.security.certificates import hosts_of

    return hosts_of(folder.certificate.read_bytes()) if folder.certificate.exists() else ()


def _new_names(folder: KeyFolder, devices: Sequence[str]) -> list[str]:
    """["3"] is three more devices under the next free numbers; anything else are names."""
    taken = set(folder.names()) | {path.name for path in (folder.path / "devices").glob("*")}
    if len(devices) == 1 and devices[0].isascii() and devices[0].isdigit():
        count = int(devices[0])
        if not 1 <= count <= 10_000:
            raise BadInput(f"--devices is a number from 1 to 10000, or names, not {devices[0]}")
        free = (name for name in (f"device-{i}" for i in range(1, len(taken) + count + 1)) if name not in taken)
        return [next(free) for _ in range(count)]
    for name in devices:
        if not NAME.fullmatch(name):
            raise BadInput(f"a device's name is 1 to 64 letters, digits, dots, dashes or underscores, not {name!r}")
        if name in taken:
            raise BadInput(
                f"device {name} has keys already: choose another name, or replace its key with "
                f"`strata fleet rotate device {name} --keys {folder.path}`"
            )
    if len(set(devices)) != len(devices):
        raise BadInput(f"a device's name may be given once, not as in {','.join(devices)}")
    return list(devices)


def make_device_keys(folder: KeyFolder, name: str) -> None:
    from strata.fleet.security.certificates import make_device

    private, public = make_device()
    keys = folder.device(name)
    making = keys.path.with_name(f".{name}.new")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(mode=0o700, parents=True)
    write_new(making / "device.key", private)
    write_new(making / "ca.pem", folder.authority.read_bytes(), 0o644)
    making.rename(keys.path)  # whole or not at all
    write_new(folder.registered / f"{name}.pub", public, 0o644)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all, and over what is there."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    write_new(new, content, mode)
    new.replace(path)


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not HOST.fullmatch(host):
            raise BadInput(
                f"--host is a name or an address such as fleet.local or 192.168.1.10, without a port, not {host!r}"
            ) from None
