"""The evaluation graph that is made from the training graph is the one that torch.export gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.graph.evaluation import Readers
from strata.graph.export import Exported, Exports, export_modes
from strata.graph.inputs import InputSpec
from tests.networks import NETWORKS

SHAPE = (3, 8, 8)


class Net(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = norm or nn.BatchNorm2d(8)
        self.drop = nn.Dropout2d(0.3)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.classifier(x.mean((2, 3)))


class AlwaysDrops(Net):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.2)


class KeepsItsNorm(Net):
    def train(self, mode: bool = True) -> KeepsItsNorm:
        super().train(mode)
        self.norm.eval()
        return self


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(2 * x)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def lines(mode: Exported) -> list[Any]:
    return [(node.name, node.op, str(node.target), str(node.args), str(node.meta)) for node in mode.graph.nodes]


def twice(monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: InputSpec) -> tuple[Exports, Exports, bool]:
    """As they are made, and as two exports give them; and whether one was enough for the first."""
    modes: list[bool] = []
    known = Readers.are_known.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(Readers, "are_known", property(lambda self: modes.append(known(self)) or modes[-1]))
        made = export_modes(model, inputs)
        patch.setattr(Readers, "are_known", False)
        return made, export_modes(model, inputs), modes[-1]


@pytest.mark.parametrize(
    ("model", "once"),
    [
        (Net(), True),
        (Net(nn.BatchNorm2d(8, track_running_stats=False)), True),
        (Net(nn.GroupNorm(2, 8)), True),
        (AlwaysDrops(), True),
        (KeepsItsNorm(), False),
        (Branches(), False),
        (Net(OwnNorm(8)), False),
    ],
)
def test_models_with_modes_of_their_own(monkeypatch: pytest.MonkeyPatch, model: nn.Module, once: bool) -> None:
    made, exported, was_once = twice(monkeypatch, model, InputSpec.of(SHAPE))
    assert was_once == once
    for mode in ("train", "eval"):
        assert lines(made.modes[mode]) == lines(exported.modes[mode])
    assert "training" not in vars(nn.Module) and all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["vgg", "gated", "padded_resnet", "densenet"])
def test_networks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, shape = NETWORKS[name]()
    made, exported, was_once = twice(monkeypatch, model, InputSpec.of(shape))
    assert was_once
    one, other = made.modes["eval"], exported.modes["eval"]
    assert lines(one) == lines(other)
    assert [node.name for node in one.outputs.values()] == [node.name for node in other.outputs.values()]
    assert [node.name for node in one.inputs.values()] == [node.name for node in other.inputs.values()]
    assert set(made.constants) == set(exported.constants)


def test_what_fails_leaves_nothing_behind() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    with pytest.raises(BadInput, match="no"):
        export_modes(Fails(), InputSpec.of(SHAPE))
    assert "training" not in vars(nn.Module)
