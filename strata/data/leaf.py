"""FEMNIST as LEAF's preprocessing writes it: train/*.json and test/*.json, samples by writer, 28x28 floats in [0, 1].

Writers become `users` (the partition `user`). The paper's equal split pools them: partition `iid` over 3550 devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.files import Allocate, Arrays, decoded_once, fingerprint
from strata.data.images import ImageSet, grey_to_rgb, resize_bilinear
from strata.data.samples import FederatedData

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
    for folder in (root / "femnist", root / "femnist" / "data", root / "data", root):
        if any((folder / "train").glob("*.json")) and any((folder / "test").glob("*.json")):
            return folder
    return None


def load_femnist(folder: Path) -> FederatedData:
    paths = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test")}

    def decode(allocate: Allocate) -> Arrays:
        return _decode(paths["train"], "train", allocate) | _decode(paths["test"], "test", allocate)

    arrays = decoded_once(folder, fingerprint(folder, [*paths["train"], *paths["test"]], "femnist 1"), decode)
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


def _user_data(path: Path, content: Any) -> list[tuple[str, Any]]:
    try:
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        rows = [(user, data[user]) for user in users]
        given = [len(samples["y"]) for _, samples in rows]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} is not in LEAF's form: users, num_samples, user_data with x and y each") from error
    if given != list(counts):
        raise BadInput(f"{path}: num_samples does not agree with user_data; run LEAF's preprocessing again")
    return rows


def _samples(path: Path, writer: str, samples: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        pixels = np.array(samples["x"], dtype=np.float64).reshape(-1, 28, 28)
        labels = np.array(samples["y"], dtype=np.int64).reshape(-1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{path}: the samples of writer {writer} are not lists of 784 numbers with labels") from error
    if len(pixels) != len(labels):
        raise BadInput(f"{path}: writer {writer} has {len(pixels)} images but {len(labels)} labels")
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise BadInput(f"{path}: writer {writer} has pixels outside [0, 1]; run LEAF's preprocessing again")
    return resize_bilinear(np.rint(pixels * 255).astype(np.uint8), 32), labels
