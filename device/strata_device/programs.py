"""Step programs that the server has offered: signed by the fleet's server, kept by what they are.

A program is its manifest and its code. Its id is a SHA-256 of both; the server signs that with the key of its own
certificate, and the certificate is the fleet's where `ca.pem` has signed it. A program that is damaged on the disk has
another id, and the server is asked for it again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from strata_device.codec import Packet, Tensor
from strata_device.errors import CannotRun, Refused
from strata_device.files import mapped, write_whole

FORMAT = 1  # of the manifest (docs/pocket.md)
SIGNED = b"strata program "  # before the id in what is signed: the key signs nothing else of this form
CODE = "step.pte"
KEPT = 8  # programs; the oldest go
LARGEST_MANIFEST = 4 << 20


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class Program(NamedTuple):
    id: str
    manifest: bytes
    code: memoryview
    cut: str
    classes: int
    at_once: int  # samples in one pass, at most
    image: tuple[int, ...]
    trained: tuple[Entry, ...]
    frozen: tuple[Entry, ...]
    buffers: tuple[Entry, ...]

    @classmethod
    def of(cls, manifest: bytes, code: memoryview) -> Program:
        """CannotRun where this device does not know what to do with it."""
        try:
            said: Any = json.loads(manifest)
            if not isinstance(said, dict) or said.get("format") != FORMAT:
                version = said.get("format") if isinstance(said, dict) else None
                raise CannotRun(f"the step program is of format {version!r}, and this device runs {FORMAT}")
            lists = [tuple(_entry(one) for one in said[name]) for name in ("trained", "frozen", "buffers")]
            if said["input"]["dtype"] != "float32" or said["input"]["stored"] != "uint8":
                raise CannotRun("the step program takes no images, and this device has no other samples")
            image = tuple(_count(size) for size in said["input"]["shape"])
            return cls(
                program_id(manifest, code), manifest, code, str(said["cut"]), _count(said["classes"]),
                _count(said["micro_batch"]), image, *lists,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CannotRun(f"the step program's manifest is not one ({type(error).__name__})") from None


def _entry(value: Any) -> Entry:
    return Entry(str(value["name"]), tuple(_count(size, 0) for size in value["shape"]))


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value < 1 << 40:
        raise ValueError("not a count")
    return value


def program_id(manifest: bytes, code: Any) -> str:
    parts = hashlib.sha256(manifest).digest() + hashlib.sha256(code).digest()
    return hashlib.sha256(b"strata program\n" + parts).hexdigest()


class Programs:
    """`authority`: the fleet's ca.pem; None: a plain-text server on this machine, which has no keys."""

    def __init__(self, folder: Path, authority: Path | None) -> None:
        self._folder, self._authority = folder / "programs", authority

    def ids(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if (path / CODE).is_file())

    def take(self, offer: Packet) -> Program:
        """An offered program, once it is known to be the server's. It is kept when `keep` is called."""
        said, code = offer.meta.get("manifest"), offer.tensors.get(CODE)
        if not isinstance(said, str) or len(said) > LARGEST_MANIFEST or code is None or code.dtype != "uint8":
            raise Refused("the server's message offers no program")
        manifest = said.encode()
        id = program_id(manifest, code.data)
        if id != offer.meta.get("program"):
            raise Refused("the server names its program by a hash that is not its own")
        if self._authority is not None:
            check_signature(id, offer.meta.get("signature"), offer.meta.get("certificate"), self._authority)
        return Program.of(manifest, code.data)

    def keep(self, program: Program) -> None:
        place = self._folder / program.id
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "manifest.json", [program.manifest])
        write_whole(place / CODE, [program.code])
        known = sorted((path for path in self._folder.iterdir()), key=lambda path: path.stat().st_mtime)
        for path in known[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def get(self, id: Any) -> Program | None:
        """None where it is not here, or no longer what it was."""
        if not isinstance(id, str) or id not in self.ids():
            return None
        place = self._folder / id
        try:
            program = Program.of((place / "manifest.json").read_bytes(), mapped(place / CODE))
        except (OSError, Refused):
            return None
        if program.id != id:
            shutil.rmtree(place, ignore_errors=True)
            return None
        return program


def check_signature(id: str, signature: Any, certificate: Any, authority: Path) -> None:
    """By the owner of a certificate that the fleet's authority has signed for its server. The cryptography is that of
    the package `cryptography`, which is loaded here and not before: it takes some MiB."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        shown = x509.load_pem_x509_certificate(certificate.encode("ascii"))
        signed = base64.b64decode(signature, validate=True)
        trusted = x509.load_pem_x509_certificate(authority.read_bytes())
        shown.verify_directly_issued_by(trusted)
        usage = shown.extensions.get_extension_for_class(x509.KeyUsage).value
        purposes = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        for_servers = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in purposes
        key = shown.public_key()
        if not (usage.digital_signature and for_servers and _is_now(shown)):
            raise ValueError("a certificate for another use, or of another time")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("a key of another kind")
        key.verify(signed, SIGNED + id.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError, AttributeError, OSError, x509.ExtensionNotFound) as error:
        raise Refused(f"the program is not signed by the server of this fleet ({type(error).__name__})") from None


def _is_now(certificate: Any) -> bool:
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    return bool(certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc)


def check_tensors(program: Program, tensors: dict[str, Tensor], without: frozenset[str] = frozenset()) -> None:
    """All that the program takes is there, in its shape. `without`: what the device has already."""
    for entry in (*program.trained, *program.frozen, *program.buffers):
        if entry.name in without:
            continue
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise Refused(f"the server's message lacks {entry.name}")
        if tensor.dtype != "float32" or tensor.shape != entry.shape:
            raise Refused(f"the server sent {entry.name} as {tensor.dtype} {tensor.shape}, which does not fit")
