"""FEMNIST as LEAF's preprocessing writes it: train/*.json and test/*.json, samples by writer, 28x28 floats in [0, 1].
Or the same in one file, femnist_leaf.npz: x uint8 [N, 28, 28], y, writer (a number) and is_test, a row for each image.

Writers become `users` (the partition `user`). The authors' equal split pools them: `iid:180` over 3550 devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.files import Allocate, Arrays, decoded_once, fingerprint, first_existing, read_npz
from strata.data.images import ImageSet, grey_to_rgb, resize_bilinear
from strata.data.samples import FederatedData

ONE_FILE = "femnist_leaf.npz"
CLASSES = 62  # 0-9, A-Z, a-z
_NAMES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class _Floats(dict[str, float]):
    """Grey values repeat (256 of them): one float object each instead of one per pixel, a third of the memory."""

    def __missing__(self, text: str) -> float:
        value = float(text)
        if len(self) < 1 << 16:
            self[text] = value
        return value


def find_femnist(root: Path) -> Path | None:
    """The folder of train and test, or the one file."""
    for folder in (root / "femnist", root / "femnist" / "data", root / "data", root):
        if any((folder / "train").glob("*.json")) and any((folder / "test").glob("*.json")):
            return folder
    return first_existing((root / "femnist" / ONE_FILE, root / ONE_FILE))


def load_femnist(place: Path) -> FederatedData:
    if place.is_file():
        folder, files = place.parent, [place]
    else:
        folder, files = place, [path for part in ("train", "test") for path in sorted((place / part).glob("*.json"))]

    def decode(allocate: Allocate) -> Arrays:
        if place.is_file():
            return _decode_one_file(place, allocate)
        parts = {part: [path for path in files if path.parent.name == part] for part in ("train", "test")}
        return _decode(parts["train"], "train", allocate) | _decode(parts["test"], "test", allocate)

    arrays = decoded_once(folder, fingerprint(folder, files, "femnist 1"), decode)
    mean, std = (0.9637,) * 3, (0.1597,) * 3
    ends = np.cumsum(arrays["train_counts"])
    train, test = (
        ImageSet(grey_to_rgb(arrays[f"{part}_images"]), torch.from_numpy(arrays[f"{part}_labels"]), mean, std)
        for part in ("train", "test")
    )
    return FederatedData(
        train, test, name="femnist", classes=CLASSES, augmentation="femnist", class_names=_NAMES,
        users=[np.arange(end - count, end) for end, count in zip(ends, arrays["train_counts"], strict=True)],
    )  # fmt: skip


def _decode(paths: list[Path], part: str, allocate: Allocate) -> Arrays:
    """Images at 32x32, labels and samples per writer, writers by name, whatever the files' order."""
    floats = _Floats()
    writers: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                content = json.load(file, parse_float=floats.__getitem__)
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{path} is not complete JSON ({error}); run LEAF's preprocessing again") from error
        for writer, samples in _user_data(path, content):
            if writer in writers:
                raise BadInput(f"{path}: writer {writer} is also in an earlier file; run LEAF's preprocessing again")
            writers[writer] = _samples(path, writer, samples)
    names = [writer for writer in sorted(writers) if len(writers[writer][1]) > 0]
    if not names:
        raise BadInput(f"{paths[0].parent} holds no samples; run LEAF's preprocessing again")
    labels = [writers[writer][1] for writer in names]
    images = allocate(f"{part}_images", (sum(map(len, labels)), 32, 32), np.uint8)
    start = 0
    for writer in names:
        own = writers.pop(writer)[0]  # let go of each as it moves: never all images twice
        images[start : start + len(own)] = own
        start += len(own)
    counts = np.array([len(own) for own in labels], dtype=np.int64)
    return {f"{part}_images": images, f"{part}_labels": np.concatenate(labels), f"{part}_counts": counts}


def _decode_one_file(path: Path, allocate: Allocate) -> Arrays:
    """The same arrays; within a writer, images in the file's order."""
    pixels, labels, writers, of_test = read_npz(
        path, ("x", "y", "writer", "is_test"), "FEMNIST: it should hold the arrays x, y, writer and is_test"
    ).values()
    if any(one.dtype.kind not in "iub" for one in (labels, writers, of_test)) or labels.dtype.kind == "b":
        raise BadInput(f"{path} should hold y, writer and is_test as whole numbers")
    rows = len(pixels) if pixels.ndim else 0
    if (
        pixels.dtype != np.uint8
        or pixels.shape[1:] != (28, 28)
        or any(one.shape != (rows,) for one in (labels, writers, of_test))
    ):
        raise BadInput(f"{path} should hold x as uint8 [N, 28, 28], and y, writer and is_test of N each")
    arrays: Arrays = {}
    for part, chosen in (("train", of_test == 0), ("test", of_test != 0)):
        order = np.flatnonzero(chosen)
        order = order[np.argsort(writers[order], kind="stable")]
        if not len(order):
            raise BadInput(f"{path} has no {part} images")
        images = arrays[f"{part}_images"] = allocate(f"{part}_images", (len(order), 32, 32), np.uint8)
        images[:] = resize_bilinear(pixels[order], 32)
        arrays[f"{part}_labels"] = labels[order].astype(np.int64)
        arrays[f"{part}_counts"] = np.unique(writers[order], return_counts=True)[1].astype(np.int64)
    return arrays


def _user_data(path: Path, content: Any) -> list[tuple[str, Any]]:
    try:
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        rows = [(user, data[user]) for user in users]
        given = [len(samples["y"]) for _, samples in rows]
        same = given == list(counts)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} is not in LEAF's form: users, num_samples, user_data with x and y each") from error
    if not same:
        raise BadInput(f"{path}: num_samples does not agree with user_data; run LEAF's preprocessing again")
    return rows


def _samples(path: Path, writer: str, samples: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        given, targets = np.array(samples["x"]), samples["y"]
        if given.size and given.dtype.kind not in "fiu":
            raise TypeError(f"pixels of {given.dtype}")
        pixels = given.astype(np.float64).reshape(-1, 28, 28)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{path}: the samples of writer {writer} are not lists of 784 numbers with labels") from error
    if not isinstance(targets, list) or not all(type(label) is int and 0 <= label < CLASSES for label in targets):
        raise BadInput(f"{path}: writer {writer} has labels that are not whole numbers within 0 to {CLASSES - 1}")
    labels = np.array(targets, dtype=np.int64)
    if len(pixels) != len(labels):
        raise BadInput(f"{path}: writer {writer} has {len(pixels)} images but {len(labels)} labels")
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise BadInput(f"{path}: writer {writer} has pixels outside [0, 1]; run LEAF's preprocessing again")
    return resize_bilinear(np.rint(pixels * 255).astype(np.uint8), 32), labels
