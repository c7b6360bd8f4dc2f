"""ImageNet at 64x64 (Chrabaszcz et al. 2017) from its npz batches: data uint8 [N, 12288], labels 1 to 1000."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.files import Allocate, Arrays, decoded_once, fingerprint, first_existing, read_npz
from strata.data.images import ImageSet
from strata.data.samples import FederatedData

# the zips hold the files bare; unzip tools like to add a folder named after the zip
_FOLDERS = (".", *(f"Imagenet64_train_part{part}{ending}" for part in (1, 2) for ending in ("_npz", "")))
_VAL_FOLDERS = (".", "Imagenet64_val_npz", "Imagenet64_val")
SIDE, CLASSES = 64, 1000


def _batches(root: Path) -> tuple[list[Path], Path | None]:
    found: dict[int, Path] = {}
    for number in range(1, 11):
        for folder in _FOLDERS:
            path = root / folder / f"train_data_batch_{number}.npz"
            if path.is_file():
                found.setdefault(number, path)
    val = first_existing(root / folder / "val_data.npz" for folder in _VAL_FOLDERS)
    return [found[number] for number in sorted(found)], val


def find_imagenet64(root: Path) -> Path | None:
    return next((folder for folder in (root / "imagenet64", root) if all(_batches(folder))), None)


def load_imagenet64(folder: Path) -> FederatedData:
    """16 GB once all ten batches are there, so they are written out once as plain arrays and memory-mapped."""
    train, val = _batches(folder)
    if val is None or not train:
        raise BadInput(f"{folder} should hold train_data_batch_1.npz to train_data_batch_10.npz and val_data.npz")
    names = [path.name for path in train]
    if names != [f"train_data_batch_{number}.npz" for number in range(1, len(names) + 1)]:
        raise BadInput(f"{folder} has {', '.join(names)}: a batch is missing among them, fetch the data set again")

    def decode(allocate: Allocate) -> Arrays:
        arrays: Arrays = {}
        for part, paths in (("train", train), ("test", [val])):
            labels = [_member(path, "labels") for path in paths]
            images = allocate(f"{part}_images", (sum(map(len, labels)), 3, SIDE, SIDE), np.uint8)
            start = 0
            for path, own in zip(paths, labels, strict=True):
                data = _member(path, "data")
                if data.dtype != np.uint8 or data.shape != (len(own), 3 * SIDE * SIDE):
                    raise BadInput(
                        f"{path}: data is {data.dtype} {data.shape} for {len(own)} labels; should be uint8 [N, 12288]"
                    )
                images[start : start + len(own)] = data.reshape(-1, 3, SIDE, SIDE)
                start += len(own)
            arrays |= {f"{part}_images": images, f"{part}_labels": np.concatenate(labels).astype(np.int64) - 1}
        return arrays

    arrays = decoded_once(folder, fingerprint(folder, [*train, val], "imagenet64 1"), decode)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    images, test = (
        ImageSet(torch.from_numpy(arrays[f"{part}_images"]), torch.from_numpy(arrays[f"{part}_labels"]), mean, std)
        for part in ("train", "test")
    )
    return FederatedData(
        images, test, name="imagenet64", classes=CLASSES, augmentation="imagenet64",
    )  # fmt: skip


def _member(path: Path, name: str) -> np.ndarray:
    array = read_npz(path, (name,), "ImageNet64 batch")[name]
    if name == "labels" and (array.ndim != 1 or not np.issubdtype(array.dtype, np.integer)):
        raise BadInput(f"{path}: labels should be a list of whole numbers, not {array.dtype} {array.shape}")
    return array
