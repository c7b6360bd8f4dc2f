"""This device's keys: `device.key` proves to the server who it is, `ca.pem` to it that the server is the fleet's."""

from __future__ import annotations

import datetime
import os
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strata_device.errors import BadInput


class DeviceKeys(NamedTuple):
    """The folder that `strata fleet keys` made for this device."""

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
    if os.path.isfile(path):
        path = path.parent
    if os.path.isdir(path / "devices") and not os.path.exists(path / "device.key"):
        if name is None:
            there = ", ".join(sorted(file.stem for file in (path / "registered").glob("*.pub"))) or "none"
            raise BadInput(f"{path} holds the keys of several devices: say with --name which this is (there: {there})")
        path = path / "devices" / name
    keys = DeviceKeys(path.absolute())
    for file in (keys.key, keys.authority):
        try:
            file.open("rb").close()
        except OSError as error:
            raise BadInput(
                f"{file} cannot be read ({error.strerror}): copy the device's folder from the one that "
                "`strata fleet keys` made"
            ) from None
    return keys


class Signer:
    """Signs each request's time, as the server asks of its devices."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @classmethod
    def of(cls, keys: DeviceKeys | None) -> Signer:
        """None: a key of the moment, for a plain-text server, which takes any."""
        if keys is None:
            return cls(ec.generate_private_key(ec.SECP384R1()))
        try:
            key = serialization.load_ssh_private_key(keys.key.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise BadInput(f"{keys.key} is not a key of `strata fleet keys`: copy the device's folder again")
        return cls(key)

    def headers(self) -> dict[str, str]:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        signature = self._key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        return {
            "flwr-public-key": b64encode(self.public).decode("ascii"),
            "flwr-timestamp": now,
            "flwr-signature": b64encode(signature).decode("ascii"),
        }
