"""Lean devices by the shorter way: the numbers of the way a device takes, and the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import strata
from strata.data import ImageSet
from strata.execution import Execution
from strata.graph import ChannelGraph, Cut
from strata.methods import FjORD, Phase, Task
from strata.models import resnet20
from strata.training import LocalTraining, Update, train_device
from strata.training import shortened as shortening
from strata.training.cohorts import cohorts, train_cohort
from strata.training.shortened import parts_may_join, shortened
from strata.training.trainer import Trainer
from tests.federation import tiny
from tests.methods.tiny import same_bits, tiny_graph, tiny_state, train
from tests.workspaces import workspace_of

LEAN = LocalTraining(8, 3, "auto", mean=(0.4,) * 3, std=(0.2,) * 3, augmentation="cifar")


class Block(nn.Module):
    """As ResNet20 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.down, self.third = nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12)
        self.classifier = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(self.stem(x)))
        x = functional.relu(x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x))))))
        return self.classifier(functional.relu(self.third(self.down(x)), inplace=True).mean((2, 3)))


class GroupNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.classifier = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.second(functional.relu(self.norm(self.first(x)))).mean((2, 3)))


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.1, self.training))


class Meeting(Block):
    """Samples meet elsewhere than in a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Reading(Block):
    """What batches have left behind is read."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.running_var is not None
        return super().forward(x) * self.first.running_var.sum()


@cache
def made(kind: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], ChannelGraph]:
    torch.manual_seed(0)
    model = kind()
    return dict(model.state_dict()), ChannelGraph(model, (3, 8, 8))


def update(graph: ChannelGraph, state: dict[str, Tensor], phase: Phase, settings: LocalTraining, count: int) -> Update:
    task, own = Task(5, 0, phase.cut, (phase,)), data(graph, count)
    return train_device(workspace_of(graph), task, phase.cut.extract(state), own, settings, 0.05, seed=9)


def data(graph: ChannelGraph, count: int, seed: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *graph.input_shape), generator=generator, dtype=torch.uint8)
    return ImageSet(images, torch.randint(0, 10, (count,), generator=generator))


CUTS: dict[str, Callable[[ChannelGraph], Cut]] = {
    "whole": lambda g: g.full(),
    "prefix": lambda g: g.prefix(0.5),
    "frozen": lambda g: g.slt(2, 3, 0.5),
    "head": lambda g: g.slt(g.depth, g.depth, 1.0),
}
WAYS: dict[str, dict[str, Any]] = {
    "parts": {},
    "chunks": {"frozen_chunk": 2, "frozen_weights": "mapped", "clip": 0.5, "proximal": 0.1},
    "norms of frozen layers": {"norm_statistics": "frozen"},
    "fixed norms": {"norm_statistics": "fixed", "fixed_after": 0},
    "momentum": {"momentum_dtype": "bfloat16", "activation_checkpointing": None},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_numbers_of_the_way_a_device_takes(cut: str, way: str) -> None:
    """Batches of 8, 8 and 4 in parts of 3: the last of each is smaller."""
    state, graph = made(Block)
    settings = replace(LEAN, **WAYS[way])
    phase = Phase(CUTS[cut](graph))
    found, group = shortened(workspace_of(graph), phase, replace(settings, shortened=True))
    assert group == 3 and not found.in_parts and found.activation_checkpointing is None and not found.maps
    reference, quick = (update(graph, state, phase, replace(settings, shortened=s), 20) for s in (False, True))
    again = update(graph, state, phase, replace(settings, shortened=True), 20)
    assert quick.loss == pytest.approx(reference.loss, rel=1e-4) and quick.peak_bytes == reference.peak_bytes
    close = 5e-3 if "momentum_dtype" in WAYS[way] else 1e-4  # which way it is rounded may flip
    for name, tensor in reference.tensors.items():
        torch.testing.assert_close(quick.tensors[name], tensor, rtol=close, atol=close)
    assert same_bits(quick.tensors, again.tensors)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("norms", ["batch", "frozen"])
@pytest.mark.parametrize("kind", [Block, resnet20])
def test_gradients_and_running_statistics_in_double_precision(
    kind: Callable[[], nn.Module], norms: str, cut: str
) -> None:
    """So that only a wrong formula can make a difference."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        model = kind()
        graph = _double(kind)
        phase, settings = Phase(CUTS[cut](graph)), LocalTraining(7, 3, norm_statistics=norms, shortened=True)
        workspace = workspace_of(graph)
        small = workspace.submodel(phase.cut)
        x, y = torch.randn(7, *graph.input_shape), torch.randint(0, 10, (7,))
        found = []
        for plain, group in ((settings, None), shortened(workspace, phase, settings)):
            small.load(phase.cut.extract(model.state_dict()))
            trainer = Trainer(workspace, phase, plain, 0.01, group)
            losses = [trainer.step((x,), y) for _ in range(2)]
            found.append((losses, {name: tensor.detach().clone() for name, tensor in small.state.items()}))
        assert group == 3 and found[0][0] == pytest.approx(found[1][0], rel=1e-10)
        for name, tensor in found[0][1].items():
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(found[1][1][name], tensor, rtol=1e-10, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def _double(kind: Callable[[], nn.Module]) -> ChannelGraph:
    side = 32 if kind is resnet20 else 8
    return ChannelGraph(kind(), (3, side, side))


def test_without_batch_norm_there_are_no_groups_to_see() -> None:
    state, graph = made(GroupNormed)
    phase = Phase(graph.full())
    lean, quick = (update(graph, state, phase, replace(LEAN, shortened=s), 20) for s in (False, True))
    plain = update(graph, state, phase, replace(LEAN, micro_batch=None, activation_checkpointing=None), 20)
    assert quick.peak_bytes == lean.peak_bytes < plain.peak_bytes
    assert same_bits(quick.tensors, plain.tensors)
    for name, tensor in lean.tensors.items():
        torch.testing.assert_close(quick.tensors[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Dropping, Meeting, Reading])
def test_parts_that_cannot_be_joined_stay_parts(kind: Callable[[], nn.Module]) -> None:
    state, graph = made(kind)
    phase = Phase(graph.full())
    settings = replace(LEAN, activation_checkpointing=None if kind is Reading else "auto")
    assert not parts_may_join(graph, phase.cut)
    assert shortened(workspace_of(graph), phase, replace(settings, shortened=True))[0].micro_batch == 3
    one, other = (update(graph, state, phase, replace(settings, shortened=s), 20) for s in (False, True))
    assert one.loss == other.loss and one.peak_bytes == other.peak_bytes and same_bits(one.tensors, other.tensors)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum").square()


def test_a_loss_of_the_users_own_sees_the_parts() -> None:
    _, graph = made(Block)
    settings = replace(LEAN, loss=summed, shortened=True)
    assert shortened(workspace_of(graph), Phase(graph.full()), settings)[0].micro_batch == 3


def test_what_only_saves_bytes_gives_the_same_bits() -> None:
    state, graph = made(Dropping)
    phase = Phase(graph.slt(2, 3, 0.5))
    settings = LocalTraining(8, None, "auto", release_gradients=True, frozen_weights="mapped")
    one, other = (update(graph, state, phase, replace(settings, shortened=s), 20) for s in (False, True))
    assert one.loss == other.loss and one.peak_bytes == other.peak_bytes and same_bits(one.tensors, other.tensors)


def test_levels() -> None:
    method = FjORD(tiny_graph(), (0.5, 0.25))
    (task,) = method.assign(0, [0])
    lean, quick = (train(method, task, tiny_state(), LocalTraining(8, 3, shortened=s)) for s in (False, True))
    assert quick.loss == pytest.approx(lean.loss, rel=1e-4) and quick.peak_bytes == lean.peak_bytes
    for name, tensor in lean.tensors.items():
        torch.testing.assert_close(quick.tensors[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_step_that_takes_much_is_simulated_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = made(Block)
    settings = replace(LEAN, shortened=True)
    monkeypatch.setattr(shortening, "ROOM", 1000)
    assert shortened(workspace_of(graph), Phase(graph.full()), settings) == (settings, None)


def test_plain_devices_are_as_they_were() -> None:
    _, graph = made(Block)
    settings = LocalTraining(8, shortened=True)
    assert shortened(workspace_of(graph), Phase(graph.full()), settings) == (settings, None)


# --- several devices as one network -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["prefix", "frozen"])
@pytest.mark.parametrize("momentum", ["float32", "bfloat16"])
def test_narrow_lean_devices_are_one_network(momentum: str, cut: str) -> None:
    state, graph = made(Block)
    workspace = workspace_of(graph)
    lean = Execution(8, 3, "auto", momentum_dtype=momentum)
    phase = Phase(CUTS[cut](graph), execution=lean)
    tasks = [Task(0, device, phase.cut, (phase,)) for device in range(2)]
    settings = LocalTraining(8, shortened=True)
    assert cohorts(workspace, tasks, [20] * 2, settings) == [[0, 1]]
    assert cohorts(workspace, tasks, [20] * 2, settings, exact=True) == [[0], [1]]
    assert cohorts(workspace, tasks, [20] * 2, replace(settings, shortened=False)) == [[0], [1]]
    own = [data(graph, 20, seed) for seed in range(2)]
    part = phase.cut.extract(state)
    together = train_cohort(workspace, tasks, [part] * 2, own, settings, 0.05, 9)
    close = 1e-4 if momentum == "float32" else 5e-3
    assert together is not None
    for task, one, found in zip(tasks, own, together, strict=True):
        alone = train_device(workspace, task, part, one, replace(settings, shortened=False), 0.05, 9)
        assert found.peak_bytes == alone.peak_bytes and found.loss == pytest.approx(alone.loss, rel=1e-4)
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=close, atol=close)


def test_devices_with_other_executions_are_other_networks() -> None:
    _, graph = made(Block)
    phases = [Phase(graph.prefix(0.5), execution=Execution(8, micro)) for micro in (3, 4, 3, None)]
    tasks = [Task(0, device, phase.cut, (phase,)) for device, phase in enumerate(phases)]
    assert cohorts(workspace_of(graph), tasks, [20] * 4, LocalTraining(8, shortened=True)) == [[0, 2], [1], [3]]


def test_parts_that_stay_parts_are_on_their_own() -> None:
    _, graph = made(Dropping)
    tasks = [Task(0, device, graph.prefix(0.5)) for device in range(2)]
    assert cohorts(workspace_of(graph), tasks, [20] * 2, LocalTraining(8, shortened=True)) == [[0, 1]]
    assert cohorts(workspace_of(graph), tasks, [20] * 2, LocalTraining(8, 3, shortened=True)) == [[0], [1]]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_the_same_bits_on_every_engine_and_the_same_counts_as_exact(tmp_path: Path) -> None:
    found = {}
    for name, workers, exact in (("none", 0, False), ("two", 2, False), ("exact", 0, True)):
        strata.run(
            tiny.model(), tiny.data(), "fedavg", training=LocalTraining(8, 3, "auto"), rounds=2, devices=4, per_round=2,
            exact=exact, workers=workers, out=tmp_path / name, progress=False,
        )  # fmt: skip
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        counts = [{key: line.get(key) for key in ("peak_bytes", "train_flops")} for line in lines]
        found[name] = (counts, (tmp_path / name / "model.safetensors").read_bytes())
    assert found["none"] == found["two"]
    assert found["none"][0] == found["exact"][0] and found["none"][1] != found["exact"][1]
    assert all(one["peak_bytes"] and one["train_flops"] for one in found["none"][0])
