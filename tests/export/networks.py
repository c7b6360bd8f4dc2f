"""Small members of families that steps are exported of; each maps [b, 3, 16, 16] or [b, 3, 32, 32] to 10 scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.models.densenet import Bottleneck, Transition
from strata.models.resnet import ResNet
from tests.networks import GatedBlock, InvertedResidual


def small_resnet(num_classes: int = 10) -> nn.Module:
    """The paper's, with one block a stage."""
    return ResNet(1, num_classes, 32)


class SmallDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.body = nn.Sequential(Bottleneck(24), Transition(36))
        self.classifier = nn.Linear(18, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(self.stem(x)).mean([2, 3]))


class SmallMobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(InvertedResidual(16, 16, 1, 2))
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class SmallGated(nn.Module):
    """GroupNorm, gates, squeeze-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, stride=2)
        self.block = GatedBlock(16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.block(self.stem(x)).mean([2, 3]))


class SmallViT(nn.Module):
    """Patches, a class token, one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 32) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norm1(x)
        heads = [one(y).view(y.shape[0], 17, 4, 8).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return self.classifier(x[:, 0])


class Odd(nn.Module):
    """Every option of the kernels that the others leave alone: strides, paddings, dilations, groups, biases, pools."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, (5, 3), stride=(2, 1), padding=(2, 0), bias=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.norm = nn.BatchNorm2d(8, affine=False)
        self.conv3 = nn.Conv2d(8, 12, 1, stride=2)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 3, 2, 1)
        x = functional.avg_pool2d(self.norm(self.conv2(x)), 3, 2, 1, count_include_pad=False)
        x = functional.hardtanh(self.conv3(x))
        return self.classifier(self.dropout(x.mean([2, 3])))


class OddRows(nn.Module):
    """The same of the kernels of transformers: causal attention over values of another width, masks, norms over
    two dimensions and without weights, both forms of GELU, SiLU, a softmax by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.added: Tensor
        self.register_buffer("added", torch.randn(2, 1, 16))
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(12, elementwise_affine=False), nn.LayerNorm([16, 10])
        self.query, self.key, self.value = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.gate, self.up = nn.Linear(10, 10), nn.Linear(10, 14)
        self.classifier = nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.patches(x).flatten(2).transpose(1, 2))
        heads = [one(x).view(x.shape[0], 16, 2, -1).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.7)
        seen = (heads[0][:, :1] @ heads[1][:, :1].transpose(2, 3) > -1).detach()  # [b, 1, 16, 16]: of each sample
        mixed = mixed + functional.scaled_dot_product_attention(*heads, attn_mask=seen)
        mixed = mixed + functional.scaled_dot_product_attention(*heads, attn_mask=self.added)
        mixed = mixed.transpose(1, 2).flatten(2)
        x = self.norm2(functional.gelu(mixed, approximate="tanh") * self.gate(mixed).softmax(-1))
        x = functional.silu(functional.gelu(self.up(x)))
        return self.classifier(x[:, 1:14:3].mean(1) + x[:, -1])


def dropping() -> nn.Module:
    return Odd(0.5)
