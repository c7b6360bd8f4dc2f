"""The 8x8 digits of scikit-learn (UCI; Alpaydin and Kaynak, CC BY 4.0), kept in the package: nothing to fetch."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from strata.data.images import ImageSet, channel_statistics, grey_to_rgb, resize_bilinear
from strata.data.samples import FederatedData

TRAIN = 1500  # of 1797; 15 for each of 100 devices. The rest, at the end, is by other writers


def load_digits() -> FederatedData:
    with (files("strata.data") / "digits.npz").open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        images, labels = archive["images"], archive["labels"].astype(np.int64)
    levels = (images.astype(np.int32) * 255 + 8) // 16  # 0..16 -> 0..255, rounded
    pictures = grey_to_rgb(resize_bilinear(levels.astype(np.uint8), 32))
    mean, std = channel_statistics(pictures[:TRAIN])
    targets = torch.from_numpy(labels)
    return FederatedData(
        train=ImageSet(pictures[:TRAIN], targets[:TRAIN], mean, std),
        test=ImageSet(pictures[TRAIN:], targets[TRAIN:], mean, std),
        name="digits", classes=10, class_names=tuple("0123456789"),
    )  # fmt: skip
