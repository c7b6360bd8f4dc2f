"""A network with what real ones have: a residual addition, a concatenation, norms, a wide and a narrow layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recorded(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.left_norm = nn.BatchNorm2d(8)
        self.right = nn.Conv2d(8, 16, 3, padding=1)
        self.right_norm = nn.GroupNorm(4, 16)
        self.join = nn.Conv2d(24, 16, 1, bias=False)
        self.join_norm = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(16 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.left_norm(self.left(x)) + x)
        y = torch.relu(self.right_norm(self.right(x)))
        x = torch.relu(self.join_norm(self.join(torch.cat([x, y], 1))))
        x = nn.functional.avg_pool2d(x, 4)
        return self.classifier(self.dropout(x.flatten(1)))


def make(num_classes: int = 10) -> nn.Module:
    return Recorded(num_classes)


def weights() -> dict[str, Tensor]:
    """Starting values that no later change of an initialisation moves: integers of a fixed sequence, scaled."""
    model, state = Recorded(), {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        if not tensor.is_floating_point():
            state[name] = tensor
        elif name.endswith("running_var") or (tensor.dim() == 1 and name.endswith("weight")):
            state[name] = torch.ones_like(tensor)
        elif tensor.dim() == 1:
            state[name] = torch.zeros_like(tensor)
        else:
            steps = (torch.arange(tensor.numel()) * 7919 + 104729 * number) % 2003 - 1001
            state[name] = (steps.double() / (1001 * (tensor[0].numel() ** 0.5))).float().view(tensor.shape)
    return state
