"""CIFAR-style ResNet20/44/56 (He et al., 2015) in the form the SLT paper uses.

3x3 stem of 16 channels, three stages of 16/32/64 channels, basic blocks. A stage that halves the resolution has a
3x3 stride-2 convolution with batch norm as its shortcut. A 4x4 average pool leaves 2x2 (32x32 input) or 4x4 (64x64)
positions of 64 channels, so the classifier has 256 or 1024 inputs.
Initial weights are torch's defaults, as the authors have them.
"""

from __future__ import annotations

from torch import Tensor, nn

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
