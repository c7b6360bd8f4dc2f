"""Augmentation of whole batches of uint8 images, from an explicit torch.Generator: the same seed gives the same bits.

cifar          pad by 4, random crop, horizontal flip
pictures       the same with the padding in proportion (H / 8: 8 at 64x64)
tinyimagenet   random resized crop (area 0.8 to 1, square), then horizontal and vertical flip
imagenet64     horizontal and vertical flip, a rotation by up to 10 degrees (what comes in from outside is black),
               then a random resized crop (area 0.8 to 1, sides' ratio 0.9 to 1.1)
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
AREA = (0.8, 1.0)  # of the image, in resized crops
SQUARE, NEARLY_SQUARE = (1.0, 1.0), (0.9, 1.1)  # their sides' ratios
TRIES = 10  # for a window that lies within the image, as torchvision; at these sizes one in four does not


Drawn = tuple[Tensor, ...]  # random numbers in the order of their use; the last dim counts the images


def augment(
    images: Tensor,
    name: str,
    generator: Generator,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Tensor:
    """uint8 [B, C, H, W] -> float32 [B, C, H, W]. `generator` is a CPU generator; `none` draws nothing from it."""
    return augmented(images, name, draw(images, name, generator), mean, std)


def draw(images: Tensor, name: str, generator: Generator) -> Drawn:
    """All that is random in augmenting these images: of some of them alone, `augmented` takes their share of it."""
    check_augmentation(name)
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise BadInput(f"augment takes uint8 images [B, C, H, W], not {images.dtype} {tuple(images.shape)}")
    batch = len(images)
    if name == "none":
        return ()
    if name == "femnist":
        return (draw_windows(batch, generator),)
    if name in ("tinyimagenet", "imagenet64"):
        drawn = (draw_windows(batch, generator), draw_flips(batch, generator), draw_flips(batch, generator))
        return (*drawn, draw_turns(batch, generator)) if name == "imagenet64" else drawn
    crops = draw_crops(batch, _padding(images, name), generator)
    flips = [draw_flips(batch, generator) for _ in range(2 if name.endswith("-vflip") else 1)]
    return (crops, *flips)


def augmented(images: Tensor, name: str, drawn: Drawn, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """The same bits for an image whether it comes alone or with others."""
    if name == "none":
        return normalise(images, mean, std)
    if name == "femnist":
        return scale_(window(images, drawn[0], ratio=NEARLY_SQUARE).contiguous(), mean, std)
    if name == "tinyimagenet":
        values = _flipped(window(images, drawn[0], ratio=SQUARE), drawn[1:])
        return scale_(values.contiguous(), mean, std)
    if name == "imagenet64":
        turned = turn(_flipped(images, drawn[1:3]).float(), DEGREES, drawn[3])
        return scale_(window(turned, drawn[0], ratio=NEARLY_SQUARE).contiguous(), mean, std)
    return normalise(_flipped(crop(images, _padding(images, name), drawn[0]), drawn[1:]), mean, std)


def _padding(images: Tensor, name: str) -> int:
    return 4 if name.startswith("cifar") else images.shape[-1] // 8


def check_augmentation(name: str) -> str:
    if name not in AUGMENTATIONS:
        raise BadInput(f"there is no augmentation {name!r}; choose one of {', '.join(AUGMENTATIONS)}")
    return name


def draw_crops(batch: int, padding: int, generator: Generator) -> Tensor:
    return torch.randint(0, 2 * padding + 1, (2, batch), generator=generator)


def crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Pad with zeros on all sides and cut the original size out at the image's place."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    # [B, C, 2p+1, 2p+1, H, W] is only a view; indexing picks one window per image
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(batch), :, offsets[0], offsets[1]]


def random_crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    return crop(images, padding, draw_crops(len(images), padding, generator))


def draw_flips(batch: int, generator: Generator) -> Tensor:
    return torch.rand(batch, generator=generator)


def flip(images: Tensor, dim: int, draws: Tensor) -> Tensor:
    return torch.where((draws < 0.5).view(-1, 1, 1, 1), images.flip(dim), images)


def _flipped(images: Tensor, draws: Sequence[Tensor]) -> Tensor:
    """From left to right, and where there are draws for it upside down."""
    for dim, own in zip((3, 2), draws, strict=False):
        images = flip(images, dim, own)
    return images


def random_flip(images: Tensor, dim: int, generator: Generator) -> Tensor:
    return flip(images, dim, draw_flips(len(images), generator))


def draw_windows(batch: int, generator: Generator) -> Tensor:
    """Places down and across; then area and ratio, as often as they are tried."""
    return torch.rand((2 + 2 * TRIES, batch), generator=generator, dtype=torch.float64)


def window_sides(draws: Tensor, area: tuple[float, float], ratio: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Height and width of each image's window, as shares of the image's: the first tried that lies within."""
    tried = draws[2:].view(TRIES, 2, -1)
    share = area[0] + (area[1] - area[0]) * tried[:, 0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    stretch = torch.exp(low + (high - low) * tried[:, 1])
    sides = torch.stack([(share / stretch).sqrt(), (share * stretch).sqrt()])  # [2, TRIES, batch]
    fits = (sides <= 1.0).all(dim=0)
    fits[-1] = True  # clamped, if it has to be
    first = fits.int().argmax(dim=0)
    height, width = sides.clamp(max=1.0)[:, first, torch.arange(draws.shape[1])]
    return height, width


def window(
    images: Tensor, draws: Tensor, area: tuple[float, float] = AREA, ratio: tuple[float, float] = SQUARE
) -> Tensor:
    """A window of each image, enlarged to the full size (bilinear). float32 in 0 to 255."""
    batch, _, height, width = images.shape
    window_h, window_w = window_sides(draws, area, ratio)
    # grid coordinates run from -1 to 1, so a window of share w may be centred anywhere within +-(1 - w)
    centre_y = (2 * draws[0] - 1) * (1 - window_h)
    centre_x = (2 * draws[1] - 1) * (1 - window_w)
    zero = torch.zeros(batch, dtype=torch.float64)
    theta = torch.stack([window_w, zero, centre_x, zero, window_h, centre_y], dim=1).view(batch, 2, 3).float()
    grid = F.affine_grid(theta, [batch, 1, height, width], align_corners=False)
    grey = images.stride(1) == 0
    source = (images[:, :1] if grey else images).float()
    result = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return result.expand(-1, images.shape[1], -1, -1) if grey else result


def resized_crop(
    images: Tensor,
    generator: Generator,
    area: tuple[float, float] = AREA,
    ratio: tuple[float, float] = SQUARE,
) -> Tensor:
    return window(images, draw_windows(len(images), generator), area, ratio)


def draw_turns(batch: int, generator: Generator) -> Tensor:
    return torch.rand(batch, generator=generator, dtype=torch.float64)


def turn(images: Tensor, degrees: float, draws: Tensor) -> Tensor:
    """Each image by an angle within +-degrees about its centre, bilinear. float32; what was outside is 0."""
    batch, channels, height, width = images.shape
    angles = (2 * draws - 1) * math.radians(degrees)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros(batch, dtype=torch.float64)
    aspect = height / width  # grid coordinates run from -1 to 1 along both sides, whatever their lengths
    theta = torch.stack([cos, -sin * aspect, zero, sin / aspect, cos, zero], dim=1).view(batch, 2, 3).float()
    grid = F.affine_grid(theta, [batch, channels, height, width], align_corners=False)
    return F.grid_sample(images.contiguous(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def random_rotation(images: Tensor, degrees: float, generator: Generator) -> Tensor:
    return turn(images, degrees, draw_turns(len(images), generator))
