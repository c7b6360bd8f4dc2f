"""A fleet's messages: refused as malformed, or read as exactly what they say."""

from __future__ import annotations

import hashlib

import torch
from hypothesis import strategies as st

from strata.fleet.protocol import codec
from tests.fuzz.budget import fuzzed
from tests.fuzz.mutations import changed_bytes, changed_text

META = {"what": "train", "round": 3, "loss": 0.5, "names": ["a", "b"]}
TENSORS = {
    "conv.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "count": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
}
GOOD = codec.encode(META, TENSORS)
HEADER = {"meta": META, "tensors": [["w", "float32", [2, 3]], ["n", "uint8", [5]]]}


def sealed(header: bytes, body: bytes) -> bytes:
    whole = codec.MAGIC + len(header).to_bytes(4, "little") + header + body
    return whole + hashlib.blake2b(whole, digest_size=codec.DIGEST).digest()


def read(data: bytes) -> None:
    try:
        packet = codec.decode(data)
    except codec.Malformed:
        return
    assert codec.encode(packet.meta, packet.tensors()) == data  # a message has one form


@fuzzed(changed_bytes(GOOD), examples=100)
def test_damaged_messages(data: bytes) -> None:
    read(data)


@fuzzed(changed_bytes(GOOD[: -codec.DIGEST]), examples=150)
def test_damaged_messages_with_a_right_digest(data: bytes) -> None:
    read(data + hashlib.blake2b(data, digest_size=codec.DIGEST).digest())


@fuzzed(st.tuples(changed_text(HEADER), st.binary(max_size=40)), examples=60)
def test_headers_that_lie(made: tuple[bytes, bytes]) -> None:
    read(sealed(*made))
