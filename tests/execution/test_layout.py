"""How images lie in memory: decided alike for training and counting, and never where torch writes past a buffer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, fx, nn

from strata.execution import Execution, memory
from strata.execution.layout import channels_last, submodel_as_trained
from strata.execution.simulated import Pass
from strata.graph import ChannelGraph
from strata.graph.inputs import images_last
from strata.ops.tape import Shape, Simulation, contiguous_strides
from strata.training import LocalTraining
from strata.training.memory import measured_bytes
from tests.networks import NAMES, graph_of
from tests.workspaces import workspace_of

# --- 1x1 convolutions that overrun -----------------------------------------------------------------------------------


class Strided(nn.Module):
    """As a ResNet's shortcut, cut to a few channels."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, 16, 1, stride=2)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.shortcut(self.stem(x).relu()).relu().mean((2, 3)))


TRAINS = """
import torch
from strata.graph import ChannelGraph
from strata.execution import Execution, measure_cut
from tests.execution.test_layout import Strided
torch.set_num_threads(1)
graph = ChannelGraph(Strided(), (3, 16, 16))
for _ in range(5):
    measure_cut(graph, graph.full(), Execution(32))
"""


def test_no_heap_is_damaged() -> None:
    """In a process of its own, because with channels last this one would die."""
    found = subprocess.run(
        [sys.executable, "-c", TRAINS],
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert found.returncode == 0, found.stderr.decode()


def test_which_convolutions_are_spared() -> None:
    few, many = ChannelGraph(Strided(4), (3, 16, 16)), ChannelGraph(Strided(16), (3, 16, 16))
    assert not channels_last(few, few.full())
    assert channels_last(many, many.full()) and not channels_last(many, many.prefix(0.5))
    frozen = few.slt(2, 2, 1.0)
    assert {"stem.weight", "shortcut.weight"} <= frozen.frozen and channels_last(few, frozen)  # no gradient of it


# --- views -----------------------------------------------------------------------------------------------------------


class Viewed(nn.Module):
    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.conv, self.classifier, self.refuses = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 64, 10), refuses

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return self.classifier(x.view(x.shape[0], -1) if self.refuses else x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_view_that_refuses(refuses: bool) -> None:
    graph = ChannelGraph(Viewed(refuses), (3, 8, 8))
    cut, execution = graph.full(), Execution(16)
    assert channels_last(graph, cut) == submodel_as_trained(graph, cut)[1] == (not refuses)
    assert memory(graph, cut, execution).total == measured_bytes(
        workspace_of(graph), cut, LocalTraining(**vars(execution))
    )


class ThereAndBack(nn.Module):
    """Pixels come first for a while: what lies the usual way then, with channels last, will not after the way back."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * side**2, 10)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.conv(x).permute(0, 2, 3, 1)
        return self.classifier(pixels.permute(0, 3, 1, 2).view(x.shape[0], -1))


def test_a_view_that_refuses_after_the_way_back() -> None:
    for side, holds in ((8, False), (1, True)):  # of one pixel all orders are one
        graph = ChannelGraph(ThereAndBack(side), (3, side, side))
        assert channels_last(graph, graph.full()) == submodel_as_trained(graph, graph.full())[1] == holds


def test_operations_of_the_caller_give_the_same_answer() -> None:
    for name in ("hf_vit", "mobilenet"):
        graph = graph_of(name)
        for cut in (graph.full(), graph.prefix(0.3)):
            answers = {channels_last(graph, cut, graph.sized(cut, samples)) for samples in (1, 2, 5)}
            assert answers == {channels_last(graph, cut)}
    graph = ChannelGraph(Viewed(refuses=True), (3, 8, 8))
    assert not any(channels_last(graph, graph.full(), graph.sized(graph.full(), samples)) for samples in (1, 2, 5))


# --- how each value lies ---------------------------------------------------------------------------------------------


def steps_of(shape: Shape, strides: Shape | None) -> list[int]:
    """Where a dim has one element, its stride says nothing."""
    return [step for size, step in zip(shape, strides or contiguous_strides(shape), strict=True) if size > 1]


@pytest.mark.parametrize("name", NAMES)
def test_strides_of_all_values(name: str) -> None:
    graph = graph_of(name)
    for cut in (graph.full(), graph.prefix(0.3)):
        module, last = submodel_as_trained(graph, cut)
        found: list[object] = []

        class Run(fx.Interpreter):
            def call_function(self, *given: object) -> object:
                found.append(super().call_function(*given))  # type: ignore[arg-type]  # noqa: B023
                return found[-1]  # noqa: B023

        batch = graph.inputs.example(2)
        with torch.random.fork_rng(devices=[]):
            Run(fx.GraphModule(module, module.train_graph)).run(*(images_last(batch) if last else batch))  # type: ignore[arg-type]
        forward = Pass(Simulation(0), graph.sized(cut, 2), last)
        values = dict(forward.standing)
        for op, real in zip(forward.calls, found, strict=True):
            values[op.name] = forward.apply(op, values)
            if isinstance(real, Tensor):
                value = values[op.name]
                assert steps_of(value.shape, value.strides) == steps_of(tuple(real.shape), real.stride()), op.name
