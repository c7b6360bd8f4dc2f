"""A part of a model that is trained as a network of its own starts as one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import strata
from strata.data import FederatedData, ImageSet
from strata.graph import ChannelGraph
from strata.graph.initial import own_fan_in
from strata.methods import Small
from strata.models.resnet import resnet20
from tests.methods.tiny import tiny_graph, tiny_net


def test_a_narrow_network_starts_with_the_deviation_of_its_own_fan_in() -> None:
    torch.manual_seed(0)
    model = resnet20()
    graph = ChannelGraph(model, (3, 32, 32))
    cut = graph.prefix(0.25)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own_fan_in(model, cut, tensors)
    narrow = cut.extract(tensors)
    for name in ("blocks.4.conv2.weight", "blocks.8.conv1.weight", "classifier.weight"):
        fan_in = math.prod(narrow[name].shape[1:])
        assert abs(float(narrow[name].std()) * math.sqrt(3 * fan_in) - 1) < 0.1, name
        assert float(narrow[name].abs().max()) <= 1 / math.sqrt(fan_in)
    assert torch.equal(tensors["stem.0.weight"], model.state_dict()["stem.0.weight"])  # three colours, cut or not
    assert torch.equal(tensors["stem.1.weight"], model.state_dict()["stem.1.weight"])  # a norm has no fan-in


def test_the_whole_model_keeps_its_weights() -> None:
    model = resnet20()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own_fan_in(model, ChannelGraph(model, (3, 32, 32)).full(), tensors)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_built_in_networks_start_with_torchs_defaults() -> None:
    torch.manual_seed(1)
    weight = resnet20().state_dict()["blocks.8.conv2.weight"]
    assert abs(float(weight.std()) * math.sqrt(3 * 64 * 9) - 1) < 0.02


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_small_model_starts_by_its_own_fan_in_unless_its_weights_were_trained_before(
    tmp_path: Path, pretrained: bool
) -> None:
    """conv1 of half the width has 4 of 8 inputs: weights that were drawn for 8 are the root of 2 too small."""
    own = ImageSet(torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % 3)
    data = FederatedData(own, own, "some", 3)
    result = strata.run(
        tiny_net(), data, Small(tiny_graph(), constraints=(0.5,)), rounds=1, devices=2, per_round=1, lr=1e-9,
        lr_end=1e-9, workers=0, out=tmp_path / "run", progress=False, pretrained=pretrained, bn="batch",
    )  # fmt: skip
    drawn, begun = tiny_net().conv1.weight[:4, :4], result.state_dict()["conv1.weight"][:4, :4]
    assert torch.allclose(begun, drawn * (1.0 if pretrained else 2**0.5), atol=1e-6)
