"""The decoder accepts exactly what the encoder writes; bytes by hand, lies in headers, random and mutated messages."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.fleet.protocol import codec
from strata.fleet.protocol.codec import Malformed, decode, encode

META = {"what": "train", "round": 3, "loss": 0.5, "names": ["a", "é"]}
TENSORS = {
    "conv.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "bn.batches": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "nan": torch.tensor([math.nan, math.inf]),
}
GOOD = encode(META, TENSORS)


def sealed(header: bytes, body: bytes = b"") -> bytes:
    """A message with a right digest around any header."""
    whole = codec.MAGIC + len(header).to_bytes(4, "little") + header + body
    return whole + hashlib.blake2b(whole, digest_size=16).digest()


def with_tensors(tensors: object, body: bytes = b"") -> bytes:
    header = json.dumps({"meta": {}, "tensors": tensors}, sort_keys=True, separators=(",", ":"))
    return sealed(header.encode(), body)


def test_bytes_by_hand() -> None:
    header = b'{"meta":{"round":1},"tensors":[["w","float32",[2]]]}'
    body = b"\x00\x00\x80\x3f" + b"\x00\x00\x00\xc0"  # 1.0 and -2.0
    assert encode({"round": 1}, {"w": torch.tensor([1.0, -2.0])}) == sealed(header, body)


def test_there_and_back() -> None:
    packet = decode(GOOD)
    assert packet.meta == META
    made = packet.tensors()
    assert list(made) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert made[name].dtype == tensor.dtype and made[name].shape == tensor.shape
        assert codec.tensor_bytes(made[name]) == codec.tensor_bytes(tensor)
    made["conv.weight"].add_(1)  # its own memory
    assert codec.tensor_bytes(packet.tensors()["conv.weight"]) == codec.tensor_bytes(TENSORS["conv.weight"])


def test_strided_tensors_travel_as_values() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert torch.equal(decode(encode({}, {"t": wide.t()})).tensors()["t"], wide.t())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a message"),
        (GOOD[:-1], "damaged"),
        (GOOD + b"\x00", "damaged"),
        (codec.MAGIC + b"\xff\xff\xff\xff" + GOOD[12:], "longer than"),
        (sealed(b"[]"), "proper form"),
        (sealed(b'{"meta":{},"tensors":[] }'), "proper form"),  # a blank too many
        (sealed(b'{"meta":{},"meta":{},"tensors":[]}'), "proper form"),
        (sealed(b'{"meta":{"x":NaN},"tensors":[]}'), "not JSON"),
        (sealed(b'{"meta":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b'},"tensors":[]}'), "not JSON"),
        (sealed(b'{"meta":{},"tensors":[],"x":1}'), "not that of a message"),
        (sealed(b'{"meta":[],"tensors":[]}'), "not that of a message"),
        (sealed("é".encode()), "not JSON"),
        (with_tensors({}), "list of tensors"),
        (with_tensors([["w", "float32"]]), "described"),
        (with_tensors([["w", "object", [1]]], b"\0" * 8), "tensors are"),
        (with_tensors([["w", ["float32"], [1]]], b"\0" * 4), "tensors are"),
        (with_tensors([["", "uint8", [1]]], b"\0"), "name"),
        (with_tensors([[1, "uint8", [1]]], b"\0"), "name"),
        (with_tensors([["w", "uint8", [True]]], b"\0"), "shape"),
        (with_tensors([["w", "uint8", [-1]]], b"\0"), "shape"),
        (with_tensors([["w", "uint8", [1.0]]], b"\0"), "shape"),
        (with_tensors([["w", "uint8", [1] * 17]], b"\0"), "shape"),
        (with_tensors([["w", "uint8", [1]], ["w", "uint8", [1]]], b"\0\0"), "twice"),
        (with_tensors([["w", "float32", [1 << 40, 1 << 7]]]), "bytes of tensors"),  # and no memory was taken for it
        (with_tensors([["w", "float32", [1 << 40, 1 << 40]]]), "shape"),
        (with_tensors([["w", "float32", [1 << 47, 1 << 47, 0]]]), "shape"),  # no bytes, but too much for torch
        (with_tensors([["w", "float32", [2]]], b"\0" * 7), "bytes of tensors"),
        (with_tensors([["w", "float32", [0, 1 << 47]]], b"\0"), "bytes of tensors"),
    ],
)  # fmt: skip
def test_refused(data: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        decode(data)


def test_what_does_not_travel() -> None:
    with pytest.raises(Malformed, match="complex64"):
        encode({}, {"z": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"loss": math.nan})


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(data: bytes, with_magic: bool) -> None:
    with pytest.raises(Malformed):
        decode(codec.MAGIC + data if with_magic else data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_random_headers_are_refused(header: bytes, body: bytes) -> None:
    with pytest.raises(Malformed):
        decode(sealed(header, body))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutations_are_refused(data: st.DataObject) -> None:
    """Bytes changed, cut out and put in: the digest tells."""
    start = data.draw(st.integers(0, len(GOOD)))
    stop = data.draw(st.integers(start, min(len(GOOD), start + 8)))
    mutated = GOOD[:start] + data.draw(st.binary(max_size=8)) + GOOD[stop:]
    if mutated == GOOD:
        return
    with pytest.raises(Malformed):
        decode(mutated)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(JSON, JSON, st.binary(max_size=40))
def test_well_sealed_nonsense(meta: object, tensors: object, body: bytes) -> None:
    """With a right digest, as a hostile device would make it: refused, or what is read is what was written."""
    header = json.dumps({"meta": meta, "tensors": tensors}, sort_keys=True, separators=(",", ":")).encode()
    try:
        packet = decode(sealed(header, body))
    except Malformed:
        return
    assert encode(packet.meta, packet.tensors()) == sealed(header, body)


SHAPES = st.lists(st.integers(-1, 3) | st.just(1 << 60), max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([*codec.SIZES, "bool"]), SHAPES).map(list), max_size=3),
    st.binary(max_size=60),
)
def test_nearly_right_tensors(tensors: list[list[object]], body: bytes) -> None:
    data = with_tensors(tensors, body)
    try:
        packet = decode(data)
    except Malformed:
        return
    assert encode(packet.meta, packet.tensors()) == data


def test_reading_needs_no_torch() -> None:
    """The client app of a small device looks into messages without loading torch."""
    code = (
        "import sys, strata.fleet.protocol.codec as codec; codec.decode(sys.stdin.buffer.read()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], input=GOOD, check=True)
