"""Images and labels in memory: uint8 until the batch. A data set is a pair of these, plus who wrote which sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from strata.core.errors import BadInput


@dataclass(frozen=True)
class ImageSet:
    """images: uint8 [N, C, H, W] (grey images are one channel expanded to three, without copies); labels: int64 [N]."""

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise BadInput(
                f"images are {self.images.dtype} of shape {tuple(self.images.shape)}; they should be uint8 [N, C, H, W]"
            )
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1:
            raise BadInput(f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}; should be int64 [N]")
        if len(self.images) != len(self.labels):
            raise BadInput(f"{len(self.images)} images but {len(self.labels)} labels; there should be one for each")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.images.shape[1]):
            raise BadInput(f"mean and std should have a value for each of the {self.images.shape[1]} channels, or none")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def normalise(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std)

    def subset(self, indices: np.ndarray | Tensor | Sequence[int]) -> ImageSet:
        index = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        if self.images.stride(1) == 0:  # grey: take one channel and expand again, a third of the bytes
            images = self.images[:, :1][index].expand(-1, self.images.shape[1], -1, -1)
        else:
            images = self.images[index]
        return replace(self, images=images, labels=self.labels[index])


@dataclass(frozen=True)
class FederatedData:
    """What a run needs. `users`: sample indices (into train) per writer where the data has writers, else None."""

    train: ImageSet
    test: ImageSet
    name: str
    classes: int
    users: list[np.ndarray] | None = None
    augmentation: str = "none"  # what suits this data in training; a name for strata.data.augment
    class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.train.shape != self.test.shape:
            raise BadInput(f"{self.name}: training images are {self.train.shape} and test images {self.test.shape}")
        for part, images in (("training", self.train), ("test", self.test)):
            if len(images) == 0:
                raise BadInput(f"{self.name}: there are no {part} images")
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= self.classes:
                raise BadInput(
                    f"{self.name}: {part} labels run from {low} to {high}; with {self.classes} classes they should be "
                    f"within 0 to {self.classes - 1}"
                )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.train.shape


def normalise(images: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """uint8 [B, C, H, W] -> float32, scaled to [0, 1], then (x - mean) / std per channel where given."""
    return scale_(images.to(torch.float32, memory_format=torch.contiguous_format, copy=True), mean, std)


def scale_(values: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """The same in place, for float32 values within 0 to 255."""
    # separate roundings (no fused multiply-add), so that every machine gives the same bits
    values.div_(255.0)
    if len(mean) > 0:
        values.sub_(torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        values.div_(torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))
    return values


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images scaled to [0, 1], from exact integer histograms."""
    means: list[float] = []
    stds: list[float] = []
    for channel in range(images.shape[1]):
        if channel > 0 and images.stride(1) == 0:
            means.append(means[0])
            stds.append(stds[0])
            continue
        histogram = np.zeros(256, dtype=np.int64)
        for chunk in images[:, channel].split(4096):
            histogram += np.bincount(chunk.reshape(-1).numpy(), minlength=256)
        total = max(1, int(histogram.sum()))
        levels = np.arange(256, dtype=np.int64)
        first, second = int((histogram * levels).sum()), int((histogram * levels**2).sum())
        mean = first / total
        means.append(round(mean / 255, 6))
        stds.append(round(max((second / total - mean * mean) ** 0.5, 1.0) / 255, 6))  # a constant channel: no blow-up
    return tuple(means), tuple(stds)


def grey_to_rgb(images: np.ndarray) -> Tensor:
    """uint8 [N, H, W] -> [N, 3, H, W], a view: the three channels are the same bytes."""
    return torch.from_numpy(images).unsqueeze(1).expand(-1, 3, -1, -1)


def resize_bilinear(images: np.ndarray, size: int, chunk: int = 4096) -> np.ndarray:
    """uint8 [N, H, W] -> uint8 [N, size, size], pixel centres aligned as in torch's interpolate(align_corners=False).

    Integer arithmetic throughout: the same bits on every machine. For enlarging (it does not smooth before shrinking).
    """
    (low_y, high_y, weight_y), (low_x, high_x, weight_x) = (_taps(side, size) for side in images.shape[1:])
    unit = 2 * size
    result = np.empty((len(images), size, size), dtype=np.uint8)
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].astype(np.int32)
        rows = part[:, low_y] * (unit - weight_y)[:, None] + part[:, high_y] * weight_y[:, None]
        both = rows[:, :, low_x] * (unit - weight_x) + rows[:, :, high_x] * weight_x
        result[start : start + chunk] = (both + unit * unit // 2) // (unit * unit)
    return result


def _taps(source: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per output pixel: the two source pixels and the second one's weight, in units of 1 / (2 * size)."""
    position = np.maximum((2 * np.arange(size) + 1) * source - size, 0)  # in units of 1 / (2 * size)
    low = np.minimum(position // (2 * size), source - 1)
    weight = (position - low * 2 * size).astype(np.int32)
    return low, np.minimum(low + 1, source - 1), weight


def wrap(
    train: Dataset[Any],
    test: Dataset[Any],
    name: str = "custom",
    classes: int | None = None,
    augmentation: str = "none",
    users: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> FederatedData:
    """Any map-style Datasets of (image tensor [C, H, W], label): uint8, or floats within [0, 1]; kept as uint8.

    Augmentation and normalisation belong to training, so give the data sets without random transforms.
    """
    from strata.data.partitions import from_indices

    train_images, train_labels = _read(train, "training")
    test_images, test_labels = _read(test, "test")
    mean, std = channel_statistics(train_images)
    seen = int(torch.cat([train_labels, test_labels]).max()) + 1
    indices = None
    if users is not None:
        checked = from_indices(users, len(train_labels))
        indices = [checked[device] for device in range(len(checked))]
    return FederatedData(
        train=ImageSet(train_images, train_labels, mean, std),
        test=ImageSet(test_images, test_labels, mean, std),
        name=name, classes=seen if classes is None else classes, users=indices, augmentation=augmentation,
    )  # fmt: skip


def _read(dataset: Dataset[Any], part: str) -> tuple[Tensor, Tensor]:
    if not hasattr(dataset, "__len__"):
        raise BadInput(f"the {part} data set has no length; give a map-style Dataset with __len__ and __getitem__")
    count = len(dataset)
    if count == 0:
        raise BadInput(f"the {part} data set is empty")
    images: Tensor | None = None
    labels = torch.empty(count, dtype=torch.int64)
    for index in range(count):
        try:
            image, label = dataset[index]
        except (TypeError, ValueError) as error:
            raise BadInput(f"sample {index} of the {part} data set is not a pair (image tensor, label)") from error
        if not isinstance(image, Tensor) or image.dim() != 3:
            raise BadInput(f"sample {index} of the {part} data set should be an image tensor [C, H, W]")
        if images is None:
            images = torch.empty((count, *image.shape), dtype=torch.uint8)
        if image.shape != images.shape[1:]:
            raise BadInput(
                f"sample {index} of the {part} data set has shape {tuple(image.shape)}, the first one "
                f"{tuple(images.shape[1:])}; all images should have one shape"
            )
        images[index] = _as_uint8(image, index, part)
        labels[index] = int(label)
    assert images is not None
    return images, labels


def _as_uint8(image: Tensor, index: int, part: str) -> Tensor:
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise BadInput(f"sample {index} of the {part} data set is {image.dtype}; images should be uint8 or float")
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise BadInput(
            f"sample {index} of the {part} data set has values outside [0, 1]; give images before normalisation "
            "(uint8, or floats within [0, 1]), Strata normalises each batch"
        )
    return (image.double() * 255).round().to(torch.uint8)


def hold_out(data: FederatedData, fraction: float, seed: int) -> tuple[FederatedData, ImageSet]:
    """Take a random share of the training images away for validation: (the rest, the validation images)."""
    count = round(fraction * len(data.train))
    if not 0 < count < len(data.train):
        raise BadInput(
            f"a validation share of {fraction} takes {count} of {len(data.train)} training images; "
            "it should leave at least one on either side, 0.05 for example"
        )
    order = np.random.default_rng([seed, 0x7A11]).permutation(len(data.train))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    users = None
    if data.users is not None:
        moved = np.full(len(data.train), -1, dtype=np.int64)
        moved[kept] = np.arange(len(kept))
        rest = [moved[user][moved[user] >= 0] for user in data.users]
        users = [user for user in rest if len(user) > 0]
    return replace(data, train=data.train.subset(kept), users=users), data.train.subset(held)
