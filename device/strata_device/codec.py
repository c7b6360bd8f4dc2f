"""One message as one flat run of bytes, as strata/fleet/protocol/codec.py has it, byte for byte.

    magic (8) | length of the header (4, little endian) | header | tensors, little endian, in order | blake2b (16)

The header is canonical JSON, {"meta": {...}, "tensors": [[name, dtype, shape], ...]}: a message has exactly one form.
Tensors stay where they are: a message that is a mapped file costs no memory but for the pages that are looked at.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from strata_device.errors import Refused

MAGIC = b"STRATA\x01\n"
PREFIX = len(MAGIC) + 4
DIGEST = 16
LARGEST_HEADER = 16 << 20
MOST_TENSORS = 100_000
LONGEST_NAME = 512
MOST_DIMS = 16
MOST_VALUES = 1 << 48
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Malformed(Refused):
    """These bytes are not a message of Strata's."""


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview  # of single bytes

    @classmethod
    def of(cls, dtype: str, shape: Iterable[int], data: Any) -> Tensor:
        return cls(dtype, tuple(shape), memoryview(data).cast("B"))


class Packet(NamedTuple):
    """A message that was read."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor]


def encode(meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    return b"".join(pieces(meta, tensors))


def header(meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    entries = []
    for name, tensor in (tensors or {}).items():
        if tensor.dtype not in SIZES or tensor.data.nbytes != SIZES[tensor.dtype] * math.prod(tensor.shape):
            raise Malformed(f"{name} is not a tensor that travels: use one of {', '.join(SIZES)}")
        entries.append([name, tensor.dtype, list(tensor.shape)])
    made = _canonical({"meta": dict(meta), "tensors": entries})
    if len(made) > LARGEST_HEADER:
        raise Malformed(f"a header of {len(made)} bytes is more than the {LARGEST_HEADER} that travel")
    return made


def pieces(meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Iterator[bytes | memoryview]:
    """The message, a piece at a time: the tensors as they are, without a copy."""
    head = header(meta, tensors)
    digest = hashlib.blake2b(digest_size=DIGEST)
    parts: list[bytes | memoryview] = [MAGIC, len(head).to_bytes(4, "little"), head]
    parts += [tensor.data for tensor in (tensors or {}).values()]
    for part in parts:
        digest.update(part)
        yield part
    yield digest.digest()


def content_digest(tensor: Tensor) -> str:
    """Names a tensor by dtype, shape and bytes."""
    made = hashlib.blake2b(f"torch.{tensor.dtype} {tensor.shape} ".encode(), digest_size=16)
    made.update(tensor.data)
    return made.hexdigest()


def decode(data: Any, largest_header: int = LARGEST_HEADER) -> Packet:
    """`data`: bytes, or a mapped file; the packet's tensors are views of it."""
    whole = memoryview(data).cast("B")
    if len(whole) < PREFIX + DIGEST or whole[: len(MAGIC)] != MAGIC:
        raise Malformed("this is not a message of Strata's, or of another version")
    end = PREFIX + int.from_bytes(whole[len(MAGIC) : PREFIX], "little")
    if end - PREFIX > largest_header or end + DIGEST > len(whole):
        raise Malformed("the header is longer than the message")
    if hashlib.blake2b(whole[:-DIGEST], digest_size=DIGEST).digest() != whole[-DIGEST:]:
        raise Malformed("the message was damaged on its way")
    said = _parse(bytes(whole[PREFIX:end]))
    if set(said) != {"meta", "tensors"} or not isinstance(said["meta"], dict):
        raise Malformed("the header is not that of a message")
    entries = _entries(said["tensors"])
    body = whole[end:-DIGEST]
    due = sum(size for _, _, _, size in entries)
    if due != len(body):
        raise Malformed(f"the header speaks of {due} bytes of tensors and {len(body)} are there")
    tensors, start = {}, 0
    for name, dtype, shape, size in entries:
        tensors[name] = Tensor(dtype, shape, body[start : start + size])
        start += size
    return Packet(said["meta"], tensors)


def _entries(values: Any) -> list[tuple[str, str, tuple[int, ...], int]]:
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
        entries.append((name, dtype, tuple(shape), SIZES[dtype] * math.prod(shape)))
    if len({entry[0] for entry in entries}) != len(entries):
        raise Malformed("a tensor is there twice")
    return entries


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("ascii"), parse_constant=_no_constant)
        same = _canonical(value) == text
    except (ValueError, RecursionError, TypeError) as error:
        raise Malformed(f"the header is not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict) or not same:
        raise Malformed("the header is not in its one proper form")
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
