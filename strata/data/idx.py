"""MNIST and Fashion-MNIST from the published idx files, plain or .gz, enlarged from 28 to 3x32x32."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.files import first_existing
from strata.data.images import ImageSet, grey_to_rgb, resize_bilinear
from strata.data.samples import FederatedData

_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read_idx(path: Path) -> np.ndarray:
    """A uint8 idx file: 0 0 8 (uint8) D (dimensions), D big-endian sizes, then the bytes."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) != 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 3:
                raise BadInput(f"{path} is not an idx file of uint8 values; fetch the data set again")
            shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
            expected = int(np.prod(shape, dtype=np.float64))
            if expected > 1 << 32:
                raise BadInput(f"{path} claims to hold {expected} bytes, far too many; fetch the data set again")
            raw = file.read(expected + 1)  # never more than it claims, whatever it inflates to
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise BadInput(f"{path} is broken or cut short ({error}); fetch the data set again") from error
    if len(raw) != expected:
        kind = "cut short" if len(raw) < expected else "too long"
        raise BadInput(f"{path} is {kind}: its header says {expected} bytes of data; fetch the data set again")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def _file(folder: Path, part: str, kind: str) -> Path | None:
    """train-images-idx3-ubyte, also as .gz, also with the dot some tools put before idx."""
    stems = (f"{part}-{kind}-ubyte", f"{part}-{kind.replace('-', '.')}-ubyte")
    return first_existing(folder / (stem + ending) for stem in stems for ending in ("", ".gz"))


def find_idx(root: Path, folders: tuple[str, ...]) -> Path | None:
    candidates = [root / folder for folder in folders] + [root]
    return next((folder for folder in candidates if _file(folder, "train", "images-idx3")), None)


def find_mnist(root: Path) -> Path | None:
    return find_idx(root, ("mnist", "MNIST/raw"))


def find_fashion(root: Path) -> Path | None:
    return find_idx(root, ("fashion-mnist", "FashionMNIST/raw"))


def load_mnist(folder: Path) -> FederatedData:
    return _load(folder, "mnist", 0.1307, 0.3081, "femnist", tuple("0123456789"))


def load_fashion(folder: Path) -> FederatedData:
    return _load(folder, "fashion-mnist", 0.2860, 0.3530, "cifar", _FASHION)


def _load(folder: Path, name: str, mean: float, std: float, augmentation: str, names: tuple[str, ...]) -> FederatedData:
    train, test = (_part(folder, part, (mean,) * 3, (std,) * 3) for part in ("train", "t10k"))
    return FederatedData(train, test, name, classes=10, augmentation=augmentation, class_names=names)


def _part(folder: Path, part: str, mean: tuple[float, ...], std: tuple[float, ...]) -> ImageSet:
    arrays = []
    for kind, dims in (("images-idx3", 3), ("labels-idx1", 1)):
        path = _file(folder, part, kind)
        if path is None:
            raise BadInput(f"{folder} has no {part}-{kind}-ubyte (or .gz); the data set is incomplete, fetch it again")
        array = read_idx(path)
        if array.ndim != dims or (dims == 3 and array.shape[1:] != (28, 28)):
            raise BadInput(f"{path} has shape {array.shape}; images should be N x 28 x 28 and labels N")
        arrays.append(array)
    images, labels = arrays
    if len(images) != len(labels):
        raise BadInput(f"{folder}: {part} has {len(images)} images but {len(labels)} labels; fetch the data set again")
    return ImageSet(grey_to_rgb(resize_bilinear(images, 32)), torch.from_numpy(labels.astype(np.int64)), mean, std)
