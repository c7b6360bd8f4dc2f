"""Images and labels in memory: uint8 until the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.data.samples import Samples, is_images


class ImageSet(Samples):
    """images: uint8 [N, C, H, W] (grey images are one channel expanded to three, without copies); labels: int64 [N]."""

    def __init__(
        self, images: Tensor, labels: Tensor, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
    ) -> None:
        if not is_images(images):
            raise BadInput(
                f"images are {images.dtype} of shape {tuple(images.shape)}; they should be uint8 [N, C, H, W]"
            )
        if labels.dtype != torch.int64 or labels.dim() != 1:
            raise BadInput(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; should be int64 [N]")
        if len(images) != len(labels):
            raise BadInput(f"{len(images)} images but {len(labels)} labels; there should be one for each")
        if len(mean) != len(std) or len(mean) not in (0, images.shape[1]):
            raise BadInput(f"mean and std should have a value for each of the {images.shape[1]} channels, or none")
        super().__init__({"x": images}, labels, mean, std)

    @property
    def images(self) -> Tensor:
        return self.inputs["x"]

    @property
    def labels(self) -> Tensor:
        return self.targets

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def normalise(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std)

    def _with(self, inputs: Mapping[str, Tensor], targets: Tensor) -> ImageSet:
        return ImageSet(inputs["x"], targets, self.mean, self.std)


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
