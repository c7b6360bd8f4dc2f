"""Data files: loaded, or refused in a sentence that names the file."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from strata.core.errors import BadInput
from strata.data import load
from strata.data.cifar import _batch
from strata.data.files import read_npz
from strata.data.folders import decode_pictures
from strata.data.idx import read_idx
from tests.data import published
from tests.fuzz.budget import fuzzed
from tests.fuzz.mutations import changed_bytes, changed_text

IDX = b"\0\0\x08\x03\0\0\0\x02\0\0\0\x03\0\0\0\x04" + bytes(24)
CIFAR = published.Python2().dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"batch_label": b"one"})
LEAF = {"users": ["w", "v"], "num_samples": [1, 1], "user_data": {w: {"x": [[0.5] * 784], "y": [1]} for w in "wv"}}


def written(save: Callable[[Any], None]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


NPZ = written(lambda file: np.savez_compressed(file, x=np.zeros((2, 28, 28), np.uint8), y=np.arange(2)))
PICTURES = [
    written(lambda file, kind=kind: Image.new("RGB", (9, 7), (1, 2, 3)).save(file, kind))  # type: ignore[misc]
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM", "TIFF")
]


def read(content: bytes, reader: Callable[[Path], Any], name: str = "file") -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(content)
        try:
            reader(path)
        except BadInput as refusal:
            assert name in str(refusal)


@fuzzed(changed_bytes(IDX), examples=60)
def test_idx(content: bytes) -> None:
    read(content, read_idx)


@fuzzed(changed_bytes(CIFAR), examples=60)
def test_cifar(content: bytes) -> None:
    read(content, lambda path: _batch(path, b"labels"))


@fuzzed(changed_bytes(NPZ), examples=60)
def test_npz(content: bytes) -> None:
    read(content, lambda path: read_npz(path, ("x", "y"), "archive"), "file.npz")


@fuzzed(changed_bytes(PICTURES[0]) | changed_bytes(PICTURES[1]), examples=40)
def test_pictures(content: bytes) -> None:
    read(content, lambda path: decode_pictures([path], np.empty((1, 3, 8, 8), np.uint8)), "cat.png")


@fuzzed(changed_bytes(b"".join(PICTURES[2:3])) | changed_bytes(PICTURES[3]) | changed_bytes(PICTURES[4])
        | changed_bytes(PICTURES[5]) | changed_bytes(PICTURES[6]), examples=40)  # fmt: skip
def test_other_pictures(content: bytes) -> None:
    read(content, lambda path: decode_pictures([path], np.empty((1, 3, 8, 8), np.uint8)), "cat.png")


@fuzzed(changed_text(LEAF), examples=30)
def test_leaf(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        for part in ("train", "test"):
            (Path(place) / part).mkdir()
            (Path(place) / part / "all.json").write_bytes(content)
        try:
            load("femnist", place)
        except BadInput:
            pass
