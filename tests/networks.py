"""The networks every room is tested on: small, but with enough channels that a quarter of them is still several.

`NETWORKS[name]()` returns `(model, input_shape)`; every model maps a float batch to logits of 10 classes. Their graphs
are made once per process, because exporting a network takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.graph import ChannelGraph
from strata.models import densenet40, resnet20, resnet44, resnet56
from strata.models.densenet import Bottleneck, Transition
from strata.models.resnet import PaddedBlock

CLASSES = 10
Built = tuple[nn.Module, tuple[int, ...]]


class VggNet(nn.Module):
    """Plain convolutions with bias, in-place ReLU, max pooling, and a `view` between features and classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 16, 0, 32, 32, 0, 64, 64, 0):
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


class InvertedResidual(nn.Module):
    """MobileNetV2 block: 1x1 expansion, depthwise 3x3, linear 1x1 projection; in-place ReLU6."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.residual = stride == 1 and channels_in == channels_out
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(
            InvertedResidual(16, 16, 1, 2),
            InvertedResidual(16, 24, 2, 4),
            InvertedResidual(24, 24, 1, 4),
            InvertedResidual(24, 32, 2, 4),
            InvertedResidual(32, 32, 1, 4),
        )
        self.last = nn.Sequential(nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6(inplace=True))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        return self.classifier(x.mean([2, 3]))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.adaptive_avg_pool2d(x, 1)
        gate = torch.sigmoid(self.expand(functional.silu(self.reduce(gate))))
        return x * gate


class GatedBlock(nn.Module):
    """GroupNorm, a `chunk` into value and gate (a gated linear unit), squeeze-excite, residual add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.excite = SqueezeExcite(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv1(functional.silu(self.norm(x))).chunk(2, dim=1)
        y = self.excite(value * torch.sigmoid(gate))
        return x + self.conv2(y)


class GatedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.block1 = GatedBlock(32)
        self.down = nn.Conv2d(32, 64, 2, stride=2)
        self.block2 = GatedBlock(64)
        self.norm = nn.GroupNorm(8, 64)
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.down(self.block1(self.stem(x))))
        x = functional.hardswish(self.norm(x))
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class PaddedResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(
            PaddedBlock(16, 16, 1),
            PaddedBlock(16, 32, 2),
            PaddedBlock(32, 32, 1),
            PaddedBlock(32, 64, 2),
            PaddedBlock(64, 64, 1),
        )
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = functional.avg_pool2d(x, x.size(3))
        return self.classifier(x.view(x.size(0), -1))


class SmallDenseNet(nn.Module):
    """DenseNet40's own parts, two bottlenecks where it has six: every kind of join, in a third of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            Bottleneck(24), Bottleneck(36), Transition(48), Bottleneck(24), Bottleneck(36), Transition(48)
        )
        self.norm, self.relu = nn.BatchNorm2d(24), nn.ReLU()
        self.pool, self.flatten = nn.AvgPool2d(8), nn.Flatten()
        self.classifier = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stages(self.stem(x))))
        return self.classifier(self.flatten(self.pool(x)))


class Logits(nn.Module):
    """A Hugging Face image classifier as `x -> logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def vgg() -> Built:
    return VggNet(), (3, 32, 32)


def mobilenet() -> Built:
    return MobileNet(), (3, 32, 32)


def gated() -> Built:
    return GatedNet(), (3, 16, 16)


def padded_resnet() -> Built:
    return PaddedResNet(), (3, 32, 32)


def hf_resnet_basic() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], layer_type="basic", num_labels=CLASSES
    )
    return Logits(ResNetForImageClassification(config)), (3, 64, 64)


def hf_resnet_bottleneck() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 64], depths=[1, 2, 1], layer_type="bottleneck", num_labels=CLASSES
    )
    return Logits(ResNetForImageClassification(config)), (3, 64, 64)


def hf_mobilenet() -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=64, depth_multiplier=0.5, num_labels=CLASSES)
    model = MobileNetV2ForImageClassification(config)
    layers = model.mobilenet_v2.layer
    # but for the first, blocks that only repeat the one before them are left out
    kept = [layer for number, layer in enumerate(layers) if number == 1 or not layer.use_residual]
    model.mobilenet_v2.layer = nn.ModuleList(kept)
    return Logits(model), (3, 64, 64)


def hf_convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        image_size=32, patch_size=2, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], num_stages=3, num_labels=CLASSES
    )
    return Logits(ConvNextForImageClassification(config)), (3, 32, 32)


def hf_regnet_y() -> Built:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128],
        depths=[1, 2, 1],
        groups_width=8,
        layer_type="y",
        num_labels=CLASSES,
    )
    return Logits(RegNetForImageClassification(config)), (3, 64, 64)


def hf_vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=CLASSES,
    )
    return Logits(ViTForImageClassification(config)), (3, 32, 32)


PAPER: dict[str, Callable[[], Built]] = {
    "resnet20": lambda: (resnet20(CLASSES), (3, 32, 32)),
    "resnet44": lambda: (resnet44(CLASSES, image_size=32), (3, 32, 32)),
    "resnet56": lambda: (resnet56(CLASSES, image_size=32), (3, 32, 32)),
    "densenet40": lambda: (densenet40(CLASSES), (3, 32, 32)),
}
OTHERS: dict[str, Callable[[], Built]] = {
    "vgg": vgg,
    "mobilenet": mobilenet,
    "gated": gated,
    "padded_resnet": padded_resnet,
    "densenet": lambda: (SmallDenseNet(), (3, 32, 32)),
    "hf_resnet_basic": hf_resnet_basic,
    "hf_resnet_bottleneck": hf_resnet_bottleneck,
    "hf_mobilenet": hf_mobilenet,
    "hf_convnext": hf_convnext,
    "hf_regnet_y": hf_regnet_y,
    "hf_vit": hf_vit,
}
NETWORKS: dict[str, Callable[[], Built]] = PAPER | OTHERS
# The larger ones have more of the same blocks: golden values know them, matrices of cases need not
NAMES = ["resnet20", *OTHERS]


@cache
def graph_of(name: str) -> ChannelGraph:
    model, input_shape = NETWORKS[name]()
    return ChannelGraph(model, input_shape)


@cache
def paper_graph(network: str, classes: int | None = None) -> ChannelGraph:
    """The paper's networks at their own input size; `classes` None: those of their data set."""
    build, own_classes, size = {
        "ResNet20": (resnet20, 10, 32),
        "ResNet44": (resnet44, 200, 64),
        "ResNet56": (resnet56, 1000, 64),
        "DenseNet40": (densenet40, 100, 32),
    }[network]
    if (network, classes or own_classes) == ("ResNet20", CLASSES):
        return graph_of("resnet20")
    return ChannelGraph(build(classes or own_classes, size), (3, size, size))
