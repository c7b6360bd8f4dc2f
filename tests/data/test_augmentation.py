from __future__ import annotations

import hashlib

import pytest
import torch
from torch.nn import functional as F

from strata.core.errors import BadInput
from strata.data import AUGMENTATIONS, augment, normalise
from strata.data.augmentation import (
    TRIES,
    augmented,
    draw_windows,
    random_crop,
    random_flip,
    random_rotation,
    resized_crop,
    turn,
    window_sides,
)
from tests.data.published import noise


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 16, size: int = 32) -> torch.Tensor:
    return torch.from_numpy(noise((count, 3, size, size), 0))


def test_normalise_by_hand():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalise(images).flatten().tolist() == [0.0, pytest.approx(0.2), 1.0]
    values = normalise(images, (0.5, 0.2, 0.0), (0.5, 1.0, 2.0)).flatten().tolist()
    assert values == [-1.0, pytest.approx(0.0, abs=1e-7), 0.5]
    assert images.flatten().tolist() == [0, 51, 255]  # the images themselves stay


def test_each_crop_is_a_window_of_the_padded_image_at_the_drawn_place():
    images = batch()
    crops = random_crop(images, 4, seeded(5))
    tops, lefts = torch.randint(0, 9, (2, 16), generator=seeded(5))
    padded = F.pad(images, (4, 4, 4, 4))
    for i, (top, left) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
        assert torch.equal(crops[i], padded[i, :, top : top + 32, left : left + 32])
    assert len(set(tops.tolist())) > 3 and crops.dtype == torch.uint8


def test_flips_are_flips_and_half_of_them():
    images = batch(400, size=4)
    for dim in (2, 3):
        flipped = random_flip(images, dim, seeded())
        same = (flipped == images).flatten(1).all(1)
        mirrored = (flipped == images.flip(dim)).flatten(1).all(1)
        assert bool((same ^ mirrored).all()) and 160 < int(mirrored.sum()) < 240


def test_resized_crop_of_the_whole_is_the_image_itself():
    images = batch()
    whole = resized_crop(images, seeded(), area=(1.0, 1.0), ratio=(1.0, 1.0))
    assert torch.allclose(whole, images.float(), atol=1e-2)


def test_resized_crop_is_a_window_enlarged():
    """On a ramp, a bilinear window is a ramp again: its slope is the window's share, its middle lies inside."""
    ramp = (torch.arange(32).view(1, 1, 1, 32) * 8).to(torch.uint8).expand(200, 3, 32, 32)
    crops = resized_crop(ramp, seeded(), ratio=(4 / 5, 5 / 4))
    share = (crops[:, 0, 16, 24] - crops[:, 0, 16, 8]) / (16 * 8)
    assert 0.78 < float(share.min()) and float(share.max()) <= 1.0001  # sqrt(0.8 * 4 / 5) = 0.8
    middle = crops[:, 0, 16, 15:17].mean(dim=1)
    assert (middle - 124).abs().max() <= 0.11 * 256 and middle.std() > 3
    assert torch.equal(crops[:, 0], crops[:, 2])


@pytest.mark.parametrize("ratio", [(0.9, 1.1), (1.0, 1.0)])
def test_windows_have_the_area_and_the_ratio_that_they_are_given(ratio, area=(0.8, 1.0)):
    """What does not lie within the image is drawn again, not cut: no window is smaller than the smallest area."""
    height, width = window_sides(draw_windows(2000, seeded()), area, ratio)
    assert float(height.max()) <= 1 and float(width.max()) <= 1
    assert area[0] - 1e-9 <= float((height * width).min()) and float((height * width).max()) <= area[1] + 1e-9
    found = width / height
    assert ratio[0] - 1e-9 <= float(found.min()) and float(found.max()) <= ratio[1] + 1e-9
    if ratio == (0.9, 1.1):  # to both ends, however much of the image is taken
        assert float(found.min()) < 0.91 and float(found.max()) > 1.09


def test_tinyimagenets_windows_are_square_and_femnists_nearly():
    """Across a ramp that falls to the right and one that falls down, the slopes are the window's sides."""
    steps = (torch.arange(32) * 8).to(torch.uint8)
    across, down = (steps.view(shape).expand(300, 3, 32, 32) for shape in ((1, 1, 1, 32), (1, 1, 32, 1)))
    for name, most in (("tinyimagenet", 1.0), ("femnist", 1 / 0.9)):
        width = (lambda values: values[:, 0, 16, 20] - values[:, 0, 16, 12])(augment(across, name, seeded())).abs()
        height = (lambda values: values[:, 0, 20, 16] - values[:, 0, 12, 16])(augment(down, name, seeded())).abs()
        ratio = torch.maximum(width / height, height / width)
        assert most - 0.01 < float(ratio.max()) < most + 1e-3, name


def test_imagenet64_is_cropped_after_it_is_turned():
    """By 6 degrees about the centre the corners come from outside, and are black; a crop then takes them away."""
    white = torch.full((1, 3, 64, 64), 255, dtype=torch.uint8)
    middle, smallest = [0.5, 0.5], [0.0, 0.5]  # places; area and ratio of each try
    drawn = (
        torch.tensor([*middle, *smallest * TRIES], dtype=torch.float64).view(-1, 1),
        torch.tensor([0.9]),
        torch.tensor([0.9]),
        torch.tensor([0.8], dtype=torch.float64),
    )
    assert float(turn(white.float(), 10.0, drawn[3])[0, 0, 0, 0]) == 0
    assert float(augmented(white, "imagenet64", drawn).min()) > 0.99


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_seed_gives_the_same_bits(name):
    images, kept = batch(), batch()
    first = augment(images, name, seeded(1), (0.5,) * 3, (0.25,) * 3)
    assert torch.equal(first, augment(images, name, seeded(1), (0.5,) * 3, (0.25,) * 3))
    assert first.dtype == torch.float32 and first.shape == images.shape and first.is_contiguous()
    assert torch.equal(images, kept)
    assert torch.equal(first, augment(images, name, seeded(2), (0.5,) * 3, (0.25,) * 3)) == (name == "none")
    # a grey image, three channels over the same bytes, is treated like any other
    grey = torch.from_numpy(noise((4, 1, 32, 32), 1)).expand(-1, 3, -1, -1)
    assert torch.equal(augment(grey, name, seeded(3)), augment(grey.contiguous(), name, seeded(3)))


def test_cifar_bits_are_known():
    values = (augment(batch(), "cifar", seeded(7)) * 255).round().to(torch.uint8)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "a79e56037e928d21"


def test_cifar_without_flip_or_shift_possible_is_the_image():
    images = torch.full((8, 3, 32, 32), 200, dtype=torch.uint8)
    centre = augment(images, "cifar", seeded())[:, :, 4:28, 4:28]
    assert torch.equal(centre, torch.full_like(centre, 200 / 255))
    tiny = augment(torch.full((64, 3, 64, 64), 200, dtype=torch.uint8), "pictures", seeded())
    zeros = (tiny[:, 0, 32] == 0).sum(dim=1)
    assert int(zeros.max()) == 8  # padded by an eighth, and the crop reaches all of it


def test_vertical_flip_is_an_addition():
    images = torch.zeros(100, 3, 32, 32, dtype=torch.uint8)
    images[:, :, :16] = 255
    plain, vertical = augment(images, "cifar", seeded()), augment(images, "cifar-vflip", seeded())
    assert bool((plain[:, 0, 8, 16] == 1).all())  # the upper half stays up
    assert 30 < int((vertical[:, 0, 8, 16] == 0).sum()) < 70


def test_tinyimagenet_crops_and_flips_both_ways():
    """A picture with four different corners: after crop and flips each corner is one of the four."""
    images = torch.zeros(400, 3, 64, 64, dtype=torch.uint8)
    for value, (top, left) in ((50, (0, 0)), (100, (0, 32)), (150, (32, 0)), (200, (32, 32))):
        images[:, :, top : top + 32, left : left + 32] = value
    corners = (augment(images, "tinyimagenet", seeded())[:, 0, 4, 4] * 255).round()
    counts = {value: int((corners == value).sum()) for value in (50, 100, 150, 200)}
    assert sum(counts.values()) == 400 and min(counts.values()) > 60


def test_a_rotation_by_hand():
    """Along a horizontal ramp, a picture turned by t has the slopes cos t and sin t; nothing else moves."""
    ramp = (torch.arange(64.0) * 2).view(1, 1, 1, 64).expand(100, 1, 64, 64)
    turned = random_rotation(ramp, 10.0, seeded(3))
    angles = (2 * torch.rand(100, generator=seeded(3), dtype=torch.float64) - 1) * 10 * torch.pi / 180
    across = (turned[:, 0, 32, 40] - turned[:, 0, 32, 24]) / 32
    down = (turned[:, 0, 40, 32] - turned[:, 0, 24, 32]) / 32
    assert torch.allclose(across.double(), angles.cos(), atol=1e-3)
    assert torch.allclose(down.double(), -angles.sin(), atol=1e-3)
    white = random_rotation(torch.full((64, 1, 32, 32), 255.0), 10.0, seeded())
    assert float(white[:, 0, 12:20, 12:20].min()) > 254.99 and float(white[:, 0, 0, 0].min()) < 100  # black corners


def test_bad_calls():
    with pytest.raises(BadInput, match="choose one of none, cifar"):
        augment(batch(), "flip", seeded())
    with pytest.raises(BadInput, match="uint8"):
        augment(batch().float(), "cifar", seeded())
