"""DenseNet-BC 40 with growth 12 (Huang et al., 2017): three dense blocks of six bottlenecks, compression 0.5."""

from __future__ import annotations

from torch import Tensor, nn

from strata.models.joins import Cat

GROWTH = 12
BOTTLENECKS_PER_BLOCK = 6


class Bottleneck(nn.Module):
    """Adds GROWTH channels to what it was given: BN-ReLU-1x1 (4 x GROWTH), BN-ReLU-3x3 (GROWTH), concatenation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * GROWTH)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)
        self.cat = Cat()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.relu1(self.bn1(x)))
        y = self.conv2(self.relu2(self.bn2(y)))
        return self.cat(x, y)


class Transition(nn.Sequential):
    """Halves channels and resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)
        )


class DenseNet(nn.Module):
    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        channels = 2 * GROWTH
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        for block in range(3):
            for _ in range(BOTTLENECKS_PER_BLOCK):
                stages.append(Bottleneck(channels))
                channels += GROWTH
            if block < 2:
                stages.append(Transition(channels))
                channels //= 2
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.pool = nn.AvgPool2d(8)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels * (image_size // 32) ** 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stages(self.stem(x))))
        return self.classifier(self.flatten(self.pool(x)))


def densenet40(num_classes: int = 100, image_size: int = 32) -> DenseNet:
    return DenseNet(num_classes, image_size)
