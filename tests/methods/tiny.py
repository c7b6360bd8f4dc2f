"""A network small enough to follow by hand, and the server's part of a round in ten lines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from strata.data import ImageSet
from strata.execution import Execution
from strata.graph import ChannelGraph
from strata.methods import Method, Task
from strata.planning import Level, Plan, Step
from strata.training import LocalTraining, Update, train_device
from tests.workspaces import workspace_of

State = dict[str, Tensor]
INPUT = (3, 8, 8)
CLASSES = 3


class TinyNet(nn.Module):
    """Stem (8 channels) with a residual block on it, then 16 channels at half the resolution. K = 4 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return self.classifier(self.pool(self.down(torch.relu(x + y))).flatten(1))


def tiny_net(seed: int = 0) -> TinyNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet()


@cache
def tiny_graph() -> ChannelGraph:
    return ChannelGraph(tiny_net(), input_shape=INPUT)


def tiny_state(seed: int = 0) -> State:
    return {name: tensor.clone() for name, tensor in tiny_net(seed).state_dict().items()}


def hand_plan(
    graph: ChannelGraph,
    *steps: tuple[int, int, float, int | None],  # k_frozen, k_trained, scale, until_round
    levels: Sequence[Sequence[int]] = (),  # k_frozen per step
    patience: int = 15,
) -> Plan:
    return Plan(
        model="hand-made",
        classes=graph.classes,
        input_shape=graph.input_shape,
        execution=Execution(),
        accounting="paper",
        schedule="early-stopping" if steps[0][3] is None else "cumulative",
        budget_bytes=0,
        full_bytes=0,
        steps=tuple(
            Step(number, k_frozen, k_trained, scale, 0, 0, 0, 0, 0, 0, 0, until)
            for number, (k_frozen, k_trained, scale, until) in enumerate(steps)
        ),
        levels=tuple(Level(None, 0, tuple(frozen)) for frozen in levels),
        patience=patience,
        graph=graph,
    )


def samples(device: int, count: int = 20, shape: Sequence[int] = INPUT) -> tuple[Tensor, Tensor]:
    """Images with a little of their class in them."""
    generator = torch.Generator().manual_seed(device)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randint(0, 128, (count, *shape), generator=generator, dtype=torch.uint8)
    return images + (labels * (128 // CLASSES)).to(torch.uint8).view(-1, 1, 1, 1), labels


PAPER = LocalTraining()


def train(method: Method, task: Task, state: State, settings: LocalTraining = PAPER, lr: float = 0.1) -> Update:
    own = ImageSet(*samples(task.device, shape=method.graph.input_shape))
    return train_device(workspace_of(method.graph), task, task.cut.extract(state), own, settings, lr, seed=1)


def aggregate(state: State, tasks: Sequence[Task], updates: Sequence[Update]) -> State:
    """Per coordinate the mean over those who trained it; the rest keeps the server's value."""
    sums = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    counts = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for task, update in zip(tasks, updates, strict=True):
        task.cut.scatter_add(sums, counts, update.tensors)
    return {
        name: torch.where(counts[name] > 0, sums[name] / counts[name].clamp(min=1), tensor).to(tensor.dtype)
        for name, tensor in state.items()
    }


def run(method: Method, rounds: int, devices: Sequence[int] = (0, 1, 2), state: State | None = None) -> State:
    state = tiny_state() if state is None else state
    for round in range(rounds):
        tasks = method.assign(round, devices)
        state = aggregate(state, tasks, [train(method, task, state) for task in tasks])
    return state


def same_bits(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
