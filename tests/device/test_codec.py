"""The thin device's codec is Strata's own, byte for byte; what is damaged costs one sentence."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from strata_device import codec as thin
from strata_device.errors import Refused
from strata_device.wire import fields

from strata.fleet.protocol import codec

# written down: neither of the two may change alone
GOLDEN = (
    b"STRATA\x01\n\x60\0\0\0"
    b'{"meta":{"a":[1,2.5,null,true],"what":"train"},"tensors":[["w","float32",[2]],["n","int64",[]]]}'
    b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x03\x00\x00\x00\x00\x00\x00\x00"
) + bytes.fromhex("838b371cec64e147a2a23ff3cace19d6")
META = {"what": "train", "a": [1, 2.5, None, True]}
TENSORS = {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor(3)}


def as_thin(tensors: dict[str, torch.Tensor]) -> dict[str, thin.Tensor]:
    return {
        name: thin.Tensor.of(str(tensor.dtype).removeprefix("torch."), tensor.shape, codec.tensor_bytes(tensor))
        for name, tensor in tensors.items()
    }


def messages(count: int) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    draw = random.Random(5)
    dtypes = [getattr(torch, name) for name in codec.SIZES]
    made = []
    for number in range(count):
        meta = {"round": number, "text": "Straße \n" * draw.randint(0, 3), "deep": {"lr": draw.random(), "none": None}}
        tensors = {}
        for name in range(draw.randint(0, 4)):
            shape = [draw.randint(0, 5) for _ in range(draw.randint(0, 3))]
            tensors[f"layer.{name}"] = (torch.from_numpy(np.random.default_rng(name).random(shape)) * 100).to(
                draw.choice(dtypes)
            )
        made.append((meta, tensors))
    return made


def test_golden_bytes() -> None:
    assert thin.encode(META, as_thin(TENSORS)) == GOLDEN == codec.encode(META, TENSORS)


def test_both_write_and_read_the_same() -> None:
    for meta, tensors in messages(60):
        written = codec.encode(meta, tensors)
        assert thin.encode(meta, as_thin(tensors)) == written
        read, own = thin.decode(written), codec.decode(written)
        assert read.meta == own.meta
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in read.tensors.items()]
        assert entries == [(entry.name, entry.dtype, entry.shape) for entry in own.entries]
        assert b"".join(tensor.data for tensor in read.tensors.values()) == own.body
        for name, tensor in tensors.items():
            assert thin.content_digest(read.tensors[name]) == codec.content_digest(tensor)


def test_damaged_messages_cost_one_sentence_and_the_two_agree() -> None:
    draw = random.Random(7)
    for meta, tensors in messages(40):
        written = codec.encode(meta, tensors)
        for _ in range(25):
            data = damaged(written, draw)
            assert outcome(thin.decode, data) == outcome(codec.decode, data)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bits turned, bytes cut out or put in, at times with a digest that fits."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(made) - 16)
        kind = draw.randrange(3)
        if kind == 0:
            made[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del made[place : place + draw.randint(1, 9)]
        else:
            made[place:place] = draw.randbytes(draw.randint(1, 9))
        if len(made) < 40:
            break
    if draw.random() < 0.7:
        made[-16:] = codec._digest(bytes(made[:-16]))
    return bytes(made)


def outcome(decode: Any, data: bytes) -> str:
    try:
        decode(data)
    except (thin.Malformed, codec.Malformed) as error:
        assert "\n" not in str(error)
        return str(error)
    return "read"


@pytest.mark.parametrize("size", [0, 1, 7, 64, 500])
def test_what_is_no_protobuf_is_refused(size: int) -> None:
    draw = random.Random(size)
    for _ in range(200):
        try:
            fields(draw.randbytes(size))
        except Refused as error:
            assert str(error) and "\n" not in str(error)
