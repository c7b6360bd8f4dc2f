"""A user's own network, small enough for many processes to train at once."""

from __future__ import annotations

from torch import nn

BUDGETS = (800 << 10, 1 << 20, 2 << 20)  # bytes; the whole network takes 865 KiB at a batch of 16


def small(num_classes: int = 10) -> nn.Module:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(3, 8, 2),
        *block(8, 16, 2),
        *block(16, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )
