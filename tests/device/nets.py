"""A network whose memory is spread over several layers alike, so that a part of it fits in less."""

from __future__ import annotations

from torch import nn


def even(num_classes: int = 10) -> nn.Module:
    def block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 8, 2), *block(8, 8), *block(8, 8), *block(8, 8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
