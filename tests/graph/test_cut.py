"""Cuts as values: by hand on small networks, in JSON, inside each other; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.graph import ChannelGraph, Cut
from strata.models import resnet20
from strata.runs.unused import refuse_unused
from tests.recorded.network import Recorded


class Residual(nn.Module):
    """stem (4) - add(stem, conv (4)) - classifier: small enough to cut by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1, bias=False)
        self.conv = nn.Conv2d(4, 4, 1, bias=False)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.classifier((x + self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return ChannelGraph(Residual(), (1, 2, 2))


@pytest.fixture(scope="module")
def resnet() -> ChannelGraph:
    return ChannelGraph(resnet20(), (3, 32, 32))


def test_prefix_by_hand(graph: ChannelGraph) -> None:
    cut = graph.prefix(0.5)
    assert cut.kept == {
        "stem.weight": ((0, 1), None, None, None),
        "conv.weight": ((0, 1), (0, 1), None, None),
        "classifier.weight": (None, (0, 1)),
        "classifier.bias": (None,),
    }
    assert cut.shapes["conv.weight"] == (2, 2, 1, 1) and cut.trained == tuple(graph.parameter_names)


def test_rolling_window_wraps_round_and_is_sorted(graph: ChannelGraph) -> None:
    assert graph.rolling(0.5, 3).kept["conv.weight"] == ((0, 3), (0, 3), None, None)
    assert graph.rolling(0.5, 4) == graph.rolling(0.5, 0) == graph.prefix(0.5)


def test_random_sets_are_coupled_through_the_residual_add(resnet: ChannelGraph) -> None:
    seen = set()
    for seed in range(4):
        cut = resnet.random(0.25, torch.Generator().manual_seed(seed))
        stream = {cut.kept[f"blocks.{i}.conv2.weight"][0] for i in range(3)}
        assert stream == {cut.kept["stem.0.weight"][0]} and len(cut.kept["stem.0.weight"][0] or ()) == 4
        assert cut.kept["blocks.1.conv1.weight"][1] == cut.kept["stem.0.weight"][0]
        assert cut.kept["blocks.3.conv2.weight"][0] == cut.kept["blocks.3.shortcut.0.weight"][0]
        seen.add(cut.kept["stem.0.weight"][0])
    assert len(seen) > 1
    again = resnet.random(0.25, torch.Generator().manual_seed(0))
    assert again == resnet.random(0.25, torch.Generator().manual_seed(0))


def test_slt_by_hand(graph: ChannelGraph) -> None:
    """Step 1: the stem is whole, the head keeps max(1, floor(0.3 * 4)) = 1, the add is cut to it."""
    cut = graph.slt(0, 1, 0.3)
    assert cut.kept["stem.weight"] == (None, None, None, None)
    assert cut.kept["conv.weight"] == ((0,), None, None, None)  # full-width input
    assert cut.kept["classifier.weight"] == (None, (0,))
    assert graph.slt(1, 2, 1).frozen == {"stem.weight"}
    assert graph.slt(1, 2, 1).trained == ("conv.weight", "classifier.weight", "classifier.bias")


def test_explicit_sets(graph: ChannelGraph) -> None:
    cut = graph.explicit({"stem.weight": [1, 3], "conv.weight": [1, 2, 3]}, frozen=["stem.weight"])
    assert cut.kept["conv.weight"] == ((1, 2, 3), (1, 3), None, None)
    assert cut.kept["classifier.weight"] == (None, (1, 3))  # where both operands of the add are
    model = Residual()
    sub = graph.submodel(cut, cut.extract(model.state_dict()))
    assert sub(torch.ones(2, 1, 2, 2)).shape == (2, 3)
    for bad, sentence in (
        ({"classifier.weight": [0]}, "hangs together"),
        ({"stem.bias": [0]}, "not a weight"),
        ({"stem.weight": []}, "at least one"),
        ({"stem.weight": [4]}, "none beyond"),
        ({"stem.weight": [0], "conv.weight": [1]}, "without channels"),
    ):
        with pytest.raises(BadInput, match=sentence):
            graph.explicit(bad)


def test_scatter_by_hand() -> None:
    graph = ChannelGraph(Residual(), (1, 2, 2))
    cut = graph.rolling(0.5, 3)  # channels 0 and 3
    sums = {"conv.weight": torch.zeros(4, 4, 1, 1)}
    counts = {"conv.weight": torch.zeros(4, 4, 1, 1)}
    update = {"conv.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 2, 1, 1)}
    cut.scatter_add(sums, counts, update)
    cut.scatter_add(sums, counts, update, weight=3)
    expected = torch.zeros(4, 4)
    expected[0, 0], expected[0, 3], expected[3, 0], expected[3, 3] = 4, 8, 12, 16
    assert torch.equal(sums["conv.weight"].view(4, 4), expected)
    assert torch.equal(counts["conv.weight"].view(4, 4), (expected > 0) * 4.0)
    with pytest.raises(BadInput, match="the cut says"):
        cut.scatter_add(sums, counts, {"conv.weight": torch.zeros(3, 2, 1, 1)})


def test_a_cut_within_a_cut(resnet: ChannelGraph) -> None:
    state = resnet20().state_dict()
    outer, inner = resnet.prefix(0.5), resnet.prefix(0.25)
    part = inner.within(outer).extract(outer.extract(state))
    assert all(torch.equal(part[name], tensor) for name, tensor in inner.extract(state).items())
    with pytest.raises(BadInput, match="outer cut does not have"):
        outer.within(inner)


def test_json_survives_a_round_trip_through_text(resnet: ChannelGraph) -> None:
    for cut in (resnet.full(), resnet.slt(2, 3, 0.4), resnet.random(0.3, torch.Generator().manual_seed(0))):
        again = Cut.from_json(json.loads(json.dumps(cut.to_json())))
        assert again == cut and again.hash == cut.hash and hash(again) == hash(cut)
        assert resnet.kept_table(again).counts == resnet.kept_table(cut).counts
    assert len({resnet.prefix(s).hash for s in (0.1, 0.2, 0.3, 0.5, 1.0)}) == 5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: d.pop("entries"), "not a cut"),
        (lambda d: d.update(entries="x"), "not a cut"),
        (lambda d: d.update(frozen=["nothing"]), "not a parameter"),
        (lambda d: d["entries"][0].update(kept=[[[0, 99]], None, None, None]), "beyond its"),
        (lambda d: d["entries"][0].update(kept=[[[5, 9], [3, 4]], None, None, None]), "out of order"),
        (lambda d: d["entries"][0].update(kept=[[], None, None, None]), "no channel"),
        (lambda d: d["entries"][0].update(kept=[None]), "not a cut"),
        (lambda d: d["entries"].append(d["entries"][0]), "twice"),
    ],
)
def test_hostile_json_is_refused(resnet: ChannelGraph, change: Any, sentence: str) -> None:
    value = json.loads(json.dumps(resnet.prefix(0.5).to_json()))
    change(value)
    with pytest.raises(BadInput, match=sentence):
        Cut.from_json(value)


def test_a_cut_of_another_model_or_of_loose_channels_is_refused(graph: ChannelGraph, resnet: ChannelGraph) -> None:
    with pytest.raises(BadInput, match="structure"):
        resnet.submodel(graph.prefix(0.5))
    value = json.loads(json.dumps(resnet.prefix(0.5).to_json()))
    weight = next(entry for entry in value["entries"] if entry["name"] == "blocks.0.conv1.weight")
    weight["kept"][1] = [[8, 16]]  # the input of a conv is not what the stem puts out
    with pytest.raises(BadInput, match="do not hang together"):
        resnet.submodel(Cut.from_json(value))


@pytest.mark.parametrize("scale", [0, -1, 1.01, 2, float("nan")])
def test_scales_outside_the_width_are_refused(graph: ChannelGraph, scale: float) -> None:
    for make in (graph.prefix, lambda s: graph.slt(0, 0, s), lambda s: graph.rolling(s, 0)):
        with pytest.raises(BadInput, match="more than 0 and at most 1"):
            make(scale)


def test_structural_hash_ignores_weights_and_sees_structure(resnet: ChannelGraph) -> None:
    assert resnet.hash == ChannelGraph(resnet20(), (3, 32, 32)).hash
    assert resnet.hash != ChannelGraph(resnet20(7), (3, 32, 32)).hash


def test_the_model_itself_is_left_as_it_was() -> None:
    model = resnet20()
    model.train()
    model.stem.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ChannelGraph(model, (3, 32, 32))
    assert model.training and not model.stem.training and not model.stem[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# --- models that cannot be used ----------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if x.sum() > 0:
            x = x * 2
        return self.classifier(x.mean((2, 3)))


class Raising(Branching):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model is broken")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Branching, r"data-dependent control flow.*test_cut\.py"),
        (Raising, "fails on input 3x8x8.*this model is broken"),
        (nn.ReLU, "has no parameters"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "no layer that can be cut"),
        (lambda: nn.Conv2d(4, 4, 1), "fails on input 3x8x8"),
    ],
)
def test_models_that_cannot_be_used_are_refused_in_one_sentence(model: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as error:
        ChannelGraph(model(), (3, 8, 8))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_the_residual_stream_may_be_kept() -> None:
    """stem and left add up; right and join do not."""
    model = Recorded().double()
    graph = ChannelGraph(model, (3, 32, 32), width="inner")
    for cut in (graph.prefix(0.5), graph.slt(0, 0, 0.5), graph.random(0.5, torch.Generator().manual_seed(0))):
        assert [cut.shapes[f"{name}.weight"][0] for name in ("stem", "left", "right", "join")] == [8, 8, 8, 8]
    assert graph.hash == ChannelGraph(model, (3, 32, 32)).hash, "devices need not know"
    with pytest.raises(BadInput, match="width is one of residual, inner"):
        ChannelGraph(model, (3, 32, 32), width="outer")
    with pytest.raises(BadInput, match="--width is for methods that narrow the model, and window does not"):
        refuse_unused({"width": "inner"}, ["window"])
    refuse_unused({"width": "inner"}, ["window", "slt"])
