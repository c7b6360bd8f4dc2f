"""What is beside an exported program: manifest.json (docs/pocket.md), weights, checksums."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.files import write_atomic

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MANIFEST, PROGRAM, WEIGHTS = "manifest.json", "step.pte", "weights.safetensors"
LISTS = ("trained", "frozen", "buffers")


@dataclass(frozen=True)
class StepProgram:
    """One exported step: the program, what there is to say of it, and weights to begin with."""

    program: bytes
    manifest: dict[str, Any] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)  # of all three lists

    @property
    def names(self) -> dict[str, list[str]]:
        return {kind: [one["name"] for one in self.manifest[kind]] for kind in LISTS}

    def write(self, folder: Path) -> None:
        """manifest.json last: a folder that has one is whole."""
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        names = [name for kind in LISTS for name in self.names[kind]]
        weights = save({name: self.tensors[name].detach().contiguous() for name in names})
        files = {PROGRAM: self.program, WEIGHTS: weights}
        for name, content in files.items():
            write_atomic(folder / name, content)
        manifest = {**self.manifest, "files": {name: described(content) for name, content in files.items()}}
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())

    def manifest_bytes(self) -> bytes:
        """As a device is sent it, without weights."""
        return json.dumps({**self.manifest, "files": {PROGRAM: described(self.program)}}).encode()


def described(content: bytes) -> dict[str, Any]:
    return {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "crc32": f"{zlib.crc32(content):08x}",
    }


def entries(names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(shapes[name])} for name in names]


def read_manifest(folder: Path) -> dict[str, Any]:
    """With its files checked against it."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as a manifest: {error}") from error
    if not isinstance(value, dict) or value.get("what") != "strata step" or value.get("format") != FORMAT:
        raise BadInput(f"{path} is not the manifest of a step in format {FORMAT}")
    files = value.get("files")
    for name in (PROGRAM, WEIGHTS):
        known = files.get(name) if isinstance(files, dict) else None
        if not isinstance(known, dict):
            raise BadInput(f"{path} says nothing of {name}")
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise BadInput(f"{folder / name} cannot be read: {error}") from error
        if described(content) != {key: known.get(key) for key in ("bytes", "sha256", "crc32")}:
            raise BadInput(f"{folder / name} is not the one that {MANIFEST} was written for: export the step again")
    return value
