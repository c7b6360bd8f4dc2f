"""One message as one flat run of bytes: a JSON header, then the tensors' own bytes, then a digest. No pickle, no code.

    magic (8) | length of the header (4, little endian) | header | tensors, little endian, in order | blake2b (16)

The header is canonical JSON, {"meta": {...}, "tensors": [[name, dtype, shape], ...]}: a message has exactly one form.
Whatever is not exactly well formed is refused with Malformed; nothing is allocated on the word of a header, because the
bytes it speaks of must be there. What the numbers mean (finite, in bounds) is for federation/checking to say.

One array per message, because each array is an HTTP object of its own in Flower. torch is loaded only for tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"STRATA\x01\n"
PREFIX = len(MAGIC) + 4
DIGEST = 16
LARGEST_HEADER = 16 << 20  # bytes; a cut of random channels lists its runs
MOST_TENSORS = 100_000
LONGEST_NAME = 512
MOST_DIMS = 16
MOST_VALUES = 1 << 48  # of a tensor, with sizes of 0 counted as 1: torch multiplies the others all the same
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Malformed(Exception):
    """These bytes are not a message of Strata's."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Packet:
    """A message that was read: what it says, and its tensors still as bytes."""

    meta: dict[str, Any]
    entries: tuple[TensorEntry, ...]
    body: bytes

    def tensors(self) -> dict[str, Tensor]:
        """Copies of their own: they may be written to, and outlive the message."""
        import torch

        made: dict[str, Tensor] = {}
        start = 0
        for entry in self.entries:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            if entry.bytes:
                part = bytearray(self.body[start : start + entry.bytes])
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))
            made[entry.name] = tensor
            start += entry.bytes
        return made


def encode(meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """`meta`: what JSON can say, without NaN. Tensors keep their order."""
    entries: list[list[Any]] = []
    parts: list[bytes] = []
    for name, tensor in (tensors or {}).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in SIZES:
            raise Malformed(f"{name} is {dtype}, which does not travel: use one of {', '.join(SIZES)}")
        entries.append([name, dtype, list(tensor.shape)])
        parts.append(tensor_bytes(tensor))
    header = _canonical({"meta": dict(meta), "tensors": entries})
    if len(header) > LARGEST_HEADER:
        raise Malformed(f"a header of {len(header)} bytes is more than the {LARGEST_HEADER} that travel")
    whole = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, *parts))
    return whole + _digest(whole)


def tensor_bytes(tensor: Tensor) -> bytes:
    """Little endian, as every machine that torch runs on."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def content_digest(tensor: Tensor) -> str:
    """Names a tensor by dtype, shape and bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(head + tensor_bytes(tensor), digest_size=16).hexdigest()


def decode(data: bytes, largest_header: int = LARGEST_HEADER) -> Packet:
    if not isinstance(data, bytes) or len(data) < PREFIX + DIGEST or data[: len(MAGIC)] != MAGIC:
        raise Malformed("this is not a message of Strata's, or of another version")
    end = PREFIX + int.from_bytes(data[len(MAGIC) : PREFIX], "little")
    if end - PREFIX > largest_header or end + DIGEST > len(data):
        raise Malformed("the header is longer than the message")
    if _digest(memoryview(data)[:-DIGEST]) != data[-DIGEST:]:
        raise Malformed("the message was damaged on its way")
    header = _parse(data[PREFIX:end])
    if set(header) != {"meta", "tensors"} or not isinstance(header["meta"], dict):
        raise Malformed("the header is not that of a message")
    entries = _entries(header["tensors"])
    body = data[end:-DIGEST]
    said = sum(entry.bytes for entry in entries)
    if said != len(body):
        raise Malformed(f"the header speaks of {said} bytes of tensors and {len(body)} are there")
    return Packet(header["meta"], entries, body)


def _entries(values: Any) -> tuple[TensorEntry, ...]:
    if not isinstance(values, list) or len(values) > MOST_TENSORS:
        raise Malformed("the list of tensors is not one")
    entries = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3:
            raise Malformed("a tensor is described by name, dtype and shape")
        name, dtype, shape = value
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise Malformed("a tensor has no proper name")
        if not isinstance(dtype, str) or dtype not in SIZES:
            raise Malformed(f"tensors are {', '.join(SIZES)}")
        if not isinstance(shape, list) or len(shape) > MOST_DIMS:
            raise Malformed("a tensor has no proper shape")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
            raise Malformed("a tensor has no proper shape")
        if math.prod(max(1, size) for size in shape) >= MOST_VALUES:
            raise Malformed("a tensor has no proper shape")
        entries.append(TensorEntry(name, dtype, tuple(shape)))
    if len({entry.name for entry in entries}) != len(entries):
        raise Malformed("a tensor is there twice")
    return tuple(entries)


def _parse(header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header.decode("ascii"), parse_constant=_no_constant)
        same = _canonical(value) == header
    except (ValueError, RecursionError, TypeError) as error:
        raise Malformed(f"the header is not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict) or not same:
        raise Malformed("the header is not in its one proper form")
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
