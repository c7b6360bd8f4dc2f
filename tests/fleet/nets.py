"""A user's own network, small enough for many processes to train at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


class Words(nn.Module):
    """The mean of a text's vectors, through two layers."""

    def __init__(self, classes: int, vocabulary: int) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(vocabulary, 8), nn.Linear(8, 16)
        self.deeper, self.scores = nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.relu(self.hidden(self.table(input_ids).mean(1)))
        return self.scores(torch.relu(self.deeper(x)))


def words(num_classes: int, vocabulary: int) -> nn.Module:
    return Words(num_classes, vocabulary)
