"""What the Ray tests send to workers: a network for digits, and programs that tell where they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strata.federation.jobs import DeviceProgram
from tests.engines.programs import Echo


class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5, stride=4, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        return self.classifier(x.mean((2, 3)))


def make(num_classes: int = 10) -> Net:
    return Net(num_classes)


def node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


class Located(Echo):
    def __call__(self, job: Any, state: Mapping[str, Tensor]) -> Any:
        verb, *values = job
        if verb == "node":
            return node()
        if verb == "gpus":
            import ray

            return len(ray.get_gpu_ids())
        if verb == "mark":
            values[0].touch()
            return node()
        if verb == "wait":  # until another job, which only another worker can do, leaves its mark
            values[0].touch()
            while not values[1].exists():
                time.sleep(0.02)
            return node()
        return super().__call__(job, state)


@dataclass
class Held(DeviceProgram):
    """Trains as usual, but never ends on a node that is named by a file in the folder; says when it is there."""

    folder: Path = Path()

    def __call__(self, job: Any, state: Any) -> Any:
        if (self.folder / node()).exists():
            (self.folder / "began").touch()
            time.sleep(600)
        return super().__call__(job, state)
