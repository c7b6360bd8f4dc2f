"""Keys that are shut out, and secrets that are replaced: each by a command, never by a file that happens to be missing.

revoked/NAME-DIGEST.pub   a public key that the server shuts out for good
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from strata.core.errors import BadInput
from strata.core.files import write_new
from strata.core.paths import writing_to
from strata.fleet.security.keys import (
    KeyFolder,
    make_certificate,
    make_device_keys,
    need_file,
    replace_file,
)
from strata.fleet.security.tokens import new_token


def revoke(folder: KeyFolder, name: str) -> bytes:
    """Shuts the device's key out for good; the name may be given to another one. The key."""
    public = _public(folder, name)
    with writing_to(folder.path):
        folder.revoked.mkdir(exist_ok=True)
        text = public.read_bytes()
        place = folder.revoked / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}.pub"
        if not place.exists():
            write_new(place, text, 0o644)
        public.unlink()  # after that: a server that looks in between shuts it out all the same
        shutil.rmtree(folder.device(name).path, ignore_errors=True)
    return text


def rotate_device(folder: KeyFolder, name: str) -> None:
    """Another key under the same name; the old one is shut out."""
    need_file(folder.authority, "it is the fleet's certificate authority, which each device gets a copy of")
    revoke(folder, name)
    with writing_to(folder.path):
        make_device_keys(folder, name)


def rotate_token(folder: KeyFolder) -> None:
    need_file(folder.token, "give the folder that `strata fleet keys` made")
    with writing_to(folder.path):
        replace_file(folder.token, new_token().encode() + b"\n")


def rotate_authority(folder: KeyFolder) -> None:
    """Another certificate authority, and a certificate by it with the names of the old one."""
    from strata.fleet.security.certificates import make_authority

    folder.check_server()
    authority = make_authority()
    with writing_to(folder.path):
        replace_file(folder.authority_key, authority.key)
        make_certificate(folder, authority, ())
        replace_file(folder.authority, authority.certificate, 0o644)
        for device in (folder.path / "devices").glob("*/device.key"):
            replace_file(device.with_name("ca.pem"), authority.certificate, 0o644)


def _public(folder: KeyFolder, name: str) -> Path:
    public = folder.registered / f"{name}.pub"
    if name not in folder.names():
        there = ", ".join(folder.names()) or "none"
        raise BadInput(f"no device {name} is registered in {folder.path}: registered are {there}")
    need_file(public, "it is the device's public key")
    return public
