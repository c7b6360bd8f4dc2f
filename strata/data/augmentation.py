"""Augmentation of whole batches of uint8 images, from an explicit torch.Generator: the same seed gives the same bits.

cifar          pad by 4, random crop, horizontal flip
pictures       the same with the padding in proportion (H / 8: 8 at 64x64)
tinyimagenet   random resized crop (area 0.8 to 1, sides' ratio 3/4 to 4/3), horizontal and vertical flip
imagenet64     the same, then a rotation by up to 10 degrees (what comes in from outside is black)
femnist        random resized crop (area 0.8 to 1, sides' ratio 0.9 to 1.1), no flip
none           nothing
`-vflip` after cifar or pictures adds the vertical flip that the paper's text speaks of; its authors' code has none for
CIFAR. tinyimagenet, imagenet64 and femnist are the authors'.
All end in float32, scaled to [0, 1] and normalised by mean and std where these are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from strata.core.errors import BadInput
from strata.data.images import normalise, scale_

AUGMENTATIONS = (
    "none",
    "cifar",
    "cifar-vflip",
    "pictures",
    "pictures-vflip",
    "tinyimagenet",
    "imagenet64",
    "femnist",
)
DEGREES = 10.0


def augment(
    images: Tensor,
    name: str,
    generator: Generator,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Tensor:
    """uint8 [B, C, H, W] -> float32 [B, C, H, W]. `generator` is a CPU generator; `none` draws nothing from it."""
    check_augmentation(name)
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise BadInput(f"augment takes uint8 images [B, C, H, W], not {images.dtype} {tuple(images.shape)}")
    if name == "none":
        return normalise(images, mean, std)
    if name == "femnist":
        return scale_(resized_crop(images, generator, ratio=(0.9, 1.1)).contiguous(), mean, std)
    if name in ("tinyimagenet", "imagenet64"):
        values = resized_crop(images, generator)
        for dim in (3, 2):
            values = random_flip(values, dim, generator)
        if name == "imagenet64":
            values = random_rotation(values, DEGREES, generator)
        return scale_(values.contiguous(), mean, std)
    padding = 4 if name.startswith("cifar") else images.shape[-1] // 8
    images = random_crop(images, padding, generator)
    images = random_flip(images, 3, generator)
    if name.endswith("-vflip"):
        images = random_flip(images, 2, generator)
    return normalise(images, mean, std)


def check_augmentation(name: str) -> str:
    if name not in AUGMENTATIONS:
        raise BadInput(f"there is no augmentation {name!r}; choose one of {', '.join(AUGMENTATIONS)}")
    return name


def random_crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Pad with zeros on all sides and cut the original size out at a random place, per image."""
    batch, _, height, width = images.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, batch), generator=generator)
    padded = F.pad(images, (padding, padding, padding, padding))
    # [B, C, 2p+1, 2p+1, H, W] is only a view; indexing picks one window per image
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(batch), :, offsets[0], offsets[1]]


def random_flip(images: Tensor, dim: int, generator: Generator) -> Tensor:
    flipped = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(dim), images)


def resized_crop(
    images: Tensor,
    generator: Generator,
    area: tuple[float, float] = (0.8, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """A random window of each image, enlarged to the full size (bilinear). float32 in 0 to 255."""
    batch, _, height, width = images.shape
    draws = torch.rand((4, batch), generator=generator, dtype=torch.float64)
    share = area[0] + (area[1] - area[0]) * draws[0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    stretch = torch.exp(low + (high - low) * draws[1])
    window_h = (share / stretch).sqrt().clamp(max=1.0)  # as shares of the full height and width
    window_w = (share * stretch).sqrt().clamp(max=1.0)
    # grid coordinates run from -1 to 1, so a window of share w may be centred anywhere within +-(1 - w)
    centre_y = (2 * draws[2] - 1) * (1 - window_h)
    centre_x = (2 * draws[3] - 1) * (1 - window_w)
    zero = torch.zeros(batch, dtype=torch.float64)
    theta = torch.stack([window_w, zero, centre_x, zero, window_h, centre_y], dim=1).view(batch, 2, 3).float()
    grid = F.affine_grid(theta, [batch, 1, height, width], align_corners=False)
    grey = images.stride(1) == 0
    source = (images[:, :1] if grey else images).float()
    result = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return result.expand(-1, images.shape[1], -1, -1) if grey else result


def random_rotation(images: Tensor, degrees: float, generator: Generator) -> Tensor:
    """Each image by an angle within +-degrees about its centre, bilinear. float32; what was outside is 0."""
    batch, channels, height, width = images.shape
    angles = (2 * torch.rand(batch, generator=generator, dtype=torch.float64) - 1) * math.radians(degrees)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros(batch, dtype=torch.float64)
    aspect = height / width  # grid coordinates run from -1 to 1 along both sides, whatever their lengths
    theta = torch.stack([cos, -sin * aspect, zero, sin / aspect, cos, zero], dim=1).view(batch, 2, 3).float()
    grid = F.affine_grid(theta, [batch, channels, height, width], align_corners=False)
    return F.grid_sample(images.contiguous(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
