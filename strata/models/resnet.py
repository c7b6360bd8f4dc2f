"""CIFAR-style ResNet20/44/56 (He et al., 2015) in the form the SLT paper uses.

3x3 stem of 16 channels, three stages of 16/32/64 channels, basic blocks. A stage that halves the resolution has a
3x3 stride-2 convolution with batch norm as its shortcut. A 4x4 average pool leaves 2x2 (32x32 input) or 4x4 (64x64)
positions of 64 channels, so the classifier has 256 or 1024 inputs.
Initial weights are torch's defaults, as the authors have them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.models.joins import Add


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False), nn.BatchNorm2d(channels_out)
            )
        self.add = Add()
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(self.add(y, self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, blocks_per_stage: int, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = 16
        for width in (16, 32, 64):
            for index in range(blocks_per_stage):
                stride = 2 if width != 16 and index == 0 else 1
                blocks.append(BasicBlock(channels, width, stride))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AvgPool2d(4)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(64 * (image_size // 16) ** 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.pool(self.blocks(self.stem(x)))))


def resnet20(num_classes: int = 10, image_size: int = 32) -> ResNet:
    return ResNet(3, num_classes, image_size)


def resnet44(num_classes: int = 200, image_size: int = 64) -> ResNet:
    return ResNet(7, num_classes, image_size)


def resnet56(num_classes: int = 1000, image_size: int = 64) -> ResNet:
    return ResNet(9, num_classes, image_size)


class PaddedBlock(nn.Module):
    """Where the resolution is halved, the shortcut takes every second position and pads channels with zeros."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride, self.padding = stride, (channels_out - channels_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return torch.relu(y + x)


class PaddedResNet(nn.Module):
    """The same networks with the original's shortcuts (option A) and a global pool, under the names that the weights of
    Yerlan Idelbayev's pytorch_resnet_cifar10 have."""

    def __init__(self, blocks_per_stage: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks_per_stage)
        self.layer2 = _stage(16, 32, blocks_per_stage)
        self.layer3 = _stage(32, 64, blocks_per_stage)
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def _stage(channels_in: int, channels_out: int, blocks: int) -> nn.Sequential:
    first = PaddedBlock(channels_in, channels_out, 1 if channels_in == channels_out else 2)
    return nn.Sequential(first, *(PaddedBlock(channels_out, channels_out, 1) for _ in range(blocks - 1)))


def padded_resnet20(num_classes: int = 10) -> PaddedResNet:
    return PaddedResNet(3, num_classes)
