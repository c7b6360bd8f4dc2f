"""What the frozen part of a network puts out, kept on a device's disk: a file for each sample, read instead of run.

A file goes by what it was made of: the weights that the part reads, its operations, and the sample as the network takes
it. So nothing stale is ever read. A device keeps those of one frozen part; the next one removes them. Files are whole
or not there (written beside their place, then renamed), end with a checksum, and only their owner can read them: they
say much of the samples. Raw bytes, no pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYOUT = "layout.json"
CHECKSUM = 4  # bytes, at the end of each sample's file
SHARE = 2  # of what is free on the disk a device takes half at the most, whatever it is asked for
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Layout:
    """Of one sample of a batch: its own dims, in the order in which they lie in memory. `constant`: of a value that is
    the same for all samples."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    constant: bool = False

    @classmethod
    def of(cls, made: Tensor, constant: bool = False) -> Layout:
        one = torch.empty_like(made) if constant else torch.empty_like(made[:1])[0]  # the order in memory, no gaps
        strides = one.stride() if _is_dense(one) else torch.empty(one.shape, device="meta").stride()
        return cls(tuple(one.shape), tuple(strides), one.dtype, constant)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def batch(self, samples: int, like: Tensor | None = None) -> Tensor:
        if self.constant:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        shape, strides = (samples, *self.shape), (prod(self.shape), *self.strides)
        if like is None:
            return torch.empty_strided(shape, strides, dtype=self.dtype)
        return like.new_empty_strided(shape, strides)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "dtype": str(self.dtype).removeprefix("torch."),
            "constant": self.constant,
        }

    @classmethod
    def from_json(cls, value: Any) -> Layout:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(value["dtype"])
        return cls(tuple(map(int, value["shape"])), tuple(map(int, value["strides"])), dtype, bool(value["constant"]))


def put(whole: dict[str, Any], name: str, made: Any, start: int, samples: int) -> Any:
    """Some samples' share of the whole batch, which is made with the first of them."""
    if not isinstance(made, Tensor):  # the number of samples
        whole[name] = samples
        return made
    if name not in whole:
        whole[name] = Layout.of(made).batch(samples, made)
    place: Tensor = whole[name][start : start + len(made)]
    place.copy_(made)
    return place


class KeptOutputs:
    """Of one frozen part, in a folder that one process uses at a time."""

    def __init__(self, folder: Path, digest: str, limit: int) -> None:
        """`folder`: the device's. `digest`: of the frozen part. `limit`: bytes of all files."""
        self.folder = folder / digest
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in folder.iterdir():
            if other.name != digest and _DIGEST.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(exist_ok=True, mode=0o700)
        self.used = 0
        for entry in os.scandir(self.folder):
            if entry.name.endswith(".tmp"):  # of a process that was killed
                os.unlink(entry.path)
            else:
                self.used += entry.stat().st_size
        self.limit = min(limit, self.used + shutil.disk_usage(self.folder).free // SHARE)
        self.layouts = self._read_layouts()

    def key(self, sample: Sequence[Tensor]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for one in sample:
            digest.update(_bytes(one))
        return digest.hexdigest()

    def read(self, key: str, whole: dict[str, Any], index: int, samples: int) -> bool:
        """Into `whole`, as this one of so many samples; False: it is not there."""
        if self.layouts is None:
            return False
        try:
            file = open(self.folder / key, "rb", buffering=0)
        except FileNotFoundError:
            return False
        with file:
            check = 0
            for name, layout in self.layouts.items():
                if layout is None:
                    whole[name] = samples
                    continue
                if name not in whole:
                    whole[name] = layout.batch(samples)
                place = _bytes(whole[name] if layout.constant else whole[name][index])
                if file.readinto(place) != len(place):
                    return False
                check = zlib.crc32(place, check)
            return file.read() == check.to_bytes(CHECKSUM, "big")

    def write(self, key: str, whole: dict[str, Any], index: int, constants: Collection[str] = ()) -> None:
        """The sample's share of `whole`, where there is room for it."""
        if self.layouts is None:
            self._write_layouts(whole, constants)
        tensors = {name: one for name, one in whole.items() if isinstance(one, Tensor)}
        parts = [_bytes(one if name in constants else one[index]) for name, one in tensors.items()]
        size = sum(map(len, parts)) + CHECKSUM
        if self.used + size > self.limit:
            return
        check = 0
        for part in parts:
            check = zlib.crc32(part, check)
        if self._put(key, [*parts, check.to_bytes(CHECKSUM, "big")]):
            self.used += size

    def _put(self, name: str, parts: Iterable[Any]) -> bool:
        """False where the disk takes no more: then it is computed again, as without."""
        temporary = self.folder / f"{name}.{secrets.token_hex(4)}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, self.folder / name)
        except OSError:
            self.limit = 0
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _write_layouts(self, whole: dict[str, Any], constants: Collection[str]) -> None:
        self.layouts = {
            name: Layout.of(one, name in constants) if isinstance(one, Tensor) else None for name, one in whole.items()
        }
        known = {name: None if one is None else one.to_json() for name, one in self.layouts.items()}
        self._put(LAYOUT, [json.dumps(known).encode()])

    def _read_layouts(self) -> dict[str, Layout | None] | None:
        try:
            known = json.loads((self.folder / LAYOUT).read_bytes())
            return {name: None if one is None else Layout.from_json(one) for name, one in known.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def digest_of(module: nn.Module, names: Iterable[str], *how: object) -> str:
    """Of these weights and buffers, and of how they are used."""
    digest = hashlib.blake2b(repr(how).encode(), digest_size=16)
    for name in names:
        tensor: Tensor = attrgetter(name)(module)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _is_dense(tensor: Tensor) -> bool:
    """Its elements lie without gaps, in whatever order."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return last + 1 == tensor.numel()


def _bytes(tensor: Tensor) -> memoryview:
    """Its own where they lie without gaps, else a copy's."""
    tensor = tensor.detach()
    if tensor.numel() and _is_dense(tensor):
        flat = tensor.as_strided((tensor.numel(),), (1,))
    else:
        flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B")
