"""A network and a data set small enough that a whole federated run takes about a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strata.data import FederatedData, ImageSet
from strata.graph import ChannelGraph
from strata.methods import Method, create
from strata.planning import plan
from strata.runs import Result, run
from strata.training import LocalTraining

CLASSES, SIZE = 3, 8
ROUNDS = 6


class TinyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        return self.classifier(x.mean((2, 3)))


@cache
def model() -> TinyNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyNet()


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(model(), (3, SIZE, SIZE))


@cache
def data() -> FederatedData:
    """Each class is a colour in noise: learnt within some rounds."""
    generator = torch.Generator().manual_seed(1)

    def images(count: int) -> ImageSet:
        labels = torch.arange(count) % CLASSES
        noise = torch.randint(0, 120, (count, 3, SIZE, SIZE), generator=generator)
        noise[torch.arange(count), labels] += 40
        return ImageSet(noise.to(torch.uint8), labels, (0.3,) * 3, (0.15,) * 3)

    return FederatedData(images(240), images(60), "tiny", CLASSES)


@cache
def method(name: str = "fd", constraint: float = 0.5, rounds: int = ROUNDS, schedule: str = "equal") -> Method:
    if name == "slt":
        return create("slt", graph(), plan=plan(graph(), batch_size=8, constraint=0.65, rounds=rounds,
                                                schedule=schedule, accounting="paper"))  # fmt: skip
    return create(name, graph(), constraints=(1.0 if name == "fedavg" else constraint,), seed=0)


def training() -> LocalTraining:
    return LocalTraining(batch_size=8, mean=(0.3,) * 3, std=(0.15,) * 3)


def tiny_run(out: Path, name: str = "fd", **options: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": ROUNDS, "devices": 12, "per_round": 4, "workers": 0, "progress": False,
        "training": training(),
    }  # fmt: skip
    settings |= options
    chosen = settings.pop("method", None) or method(name, rounds=settings["rounds"])
    return run(model(), data(), chosen, out=out, **settings)


def bits(out: Path) -> tuple[list[str], bytes]:
    """What must be equal: metrics.jsonl less seconds, and the weights."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [line.split(', "seconds"')[0] for line in lines], (out / "model.safetensors").read_bytes()
