"""ResNet18 (He et al., 2015) for small images: a 3x3 stem and no pooling before the stages, widths 64 to 512.

A network whose parameters (11.2 million for 10 classes) outweigh its activations, unlike the CIFAR ResNets. Shortcuts
that change the width are 1x1 convolutions. With batch norm, or with group norm (Wu and He, 2018: 32 groups), in which
samples do not meet; a cut keeps whole groups.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from strata.models.joins import Add

WIDTHS = (64, 128, 256, 512)
BLOCKS_PER_STAGE = 2
GROUPS = 32

Norm = Callable[[int], nn.Module]


class ProjectedBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = norm(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(channels_out))
        self.add = Add()
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu2(self.add(y, self.shortcut(x)))


class ResNet18(nn.Module):
    def __init__(self, num_classes: int, norm: Norm) -> None:
        super().__init__()
        channels = WIDTHS[0]
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 1, 1, bias=False), norm(channels), nn.ReLU())
        blocks: list[nn.Module] = []
        for width in WIDTHS:
            for _ in range(BLOCKS_PER_STAGE):
                blocks.append(ProjectedBlock(channels, width, 1 if width == channels else 2, norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.pool(self.blocks(self.stem(x)))))


def resnet18(num_classes: int = 10, image_size: int = 32) -> ResNet18:
    return ResNet18(num_classes, nn.BatchNorm2d)


def resnet18_gn(num_classes: int = 10, image_size: int = 32) -> ResNet18:
    return ResNet18(num_classes, lambda channels: nn.GroupNorm(GROUPS, channels))
