"""What new channels start from: by hand on a tiny network, and that nothing changes where nothing should."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strata.core.seeds import generator
from strata.graph import ChannelGraph, Cut
from strata.graph.filling import filled
from tests.methods.tiny import tiny_graph, tiny_state
from tests.networks import NETWORKS, graph_of


def outputs(graph: ChannelGraph, cut: Cut, state: dict[str, Tensor], images: Tensor, training: bool) -> Tensor:
    double = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    module = graph.submodel(cut, cut.extract(double)).double()
    module.train(training)  # batch norm by the batch
    with torch.no_grad():
        return module(images.double())


def test_zero_by_hand() -> None:
    graph, state = tiny_graph(), tiny_state()
    before, after = graph.slt(0, 0, 0.25), graph.slt(0, 1, 0.5)  # stem 2 -> 8; conv1, conv2 2 -> 4; down 4 -> 8
    made = filled(graph, "zero", before, after, state, generator(0, "fill"))
    weight, old = made["conv1.weight"], state["conv1.weight"]
    assert torch.equal(weight[:2, :2], old[:2, :2]) and weight[:2, 2:].eq(0).all(), "old outputs hear nothing new"
    assert torch.equal(weight[2:], old[2:]), "new outputs, and all that is outside, are as they were"
    # at the sum the stem's 8 channels are cut to conv2's: 2, then 4
    assert made["down.0.weight"][:4, 2:4].eq(0).all() and torch.equal(
        made["down.0.weight"][:, 4:], state["down.0.weight"][:, 4:]
    )
    assert made["classifier.weight"][:, 4:8].eq(0).all() and not made["classifier.weight"][:, 8:].eq(0).any()
    for name in ("stem.0.weight", "bn1.weight", "classifier.bias"):
        assert torch.equal(made[name], state[name])


def test_fan_in_by_hand() -> None:
    graph, state = tiny_graph(), tiny_state()
    first = filled(graph, "fan-in", None, graph.slt(0, 0, 0.25), state, generator(0, "fill"))
    # conv1 takes 2 of 8 channels: its weights start at twice what was drawn; the stem's three inputs stay
    assert torch.allclose(first["conv1.weight"][:2, :2], 2 * state["conv1.weight"][:2, :2])
    assert torch.equal(first["conv1.weight"][2:], state["conv1.weight"][2:])
    assert torch.equal(first["stem.0.weight"], state["stem.0.weight"])
    assert torch.allclose(first["classifier.bias"], 2 * state["classifier.bias"])  # 4 of 16 inputs
    second = filled(graph, "fan-in", graph.slt(0, 0, 0.25), graph.slt(0, 1, 0.5), first, generator(0, "fill"))
    assert torch.equal(second["conv1.weight"], first["conv1.weight"]), "all 8 inputs: as they were drawn"
    assert torch.equal(second["conv2.weight"][:2, :2], first["conv2.weight"][:2, :2]), "trained meanwhile"
    assert torch.allclose(second["conv2.weight"][:4, 2:4], math.sqrt(2) * state["conv2.weight"][:4, 2:4])
    assert torch.equal(second["classifier.bias"], first["classifier.bias"])


def test_copies_by_hand() -> None:
    graph, state = tiny_graph(), tiny_state()
    before, after = graph.slt(0, 0, 0.25), graph.slt(0, 1, 0.5)
    made = filled(graph, "copies", before, after, state, generator(0, "fill"))
    stem, conv1, conv2 = (made[f"{name}.weight"] for name in ("stem.0", "conv1", "conv2"))
    for channel in range(2, 8):
        assert torch.equal(stem[channel], state["stem.0.weight"][channel % 2])
    # outputs 2 and 3 are copies of 0 and 1; the weights to all copies of a channel of the stem add up to the old one
    old = state["conv1.weight"]
    for row in range(4):
        assert torch.allclose(conv1[row, 0::2].sum(0), old[row % 2, 0], atol=1e-6)
        assert torch.allclose(conv1[row, 1::2].sum(0), old[row % 2, 1], atol=1e-6)
    assert not torch.allclose(conv1[0], conv1[2]), "shares differ, so that copies grow apart"
    assert torch.allclose(conv2[0, 0] + conv2[0, 2], state["conv2.weight"][0, 0], atol=1e-6)
    later = filled(graph, "copies", after, graph.slt(1, 2, 1.0), made, generator(0, "fill"))
    # the stem's channels 4 to 7 were there before conv2's came to meet them: no copies, so nobody hears them
    assert later["down.0.weight"][:, 4:].eq(0).all()


STEPS = ((0, 0, 0.25), (0, 1, 0.3), (1, 2, 0.5), (4, 5, 0.75), (5, 6, 1.0))


@pytest.mark.parametrize("fill", ["zero", "copies"])
@pytest.mark.parametrize("network", ["resnet20", "densenet", "vgg", "mobilenet"])
def test_the_network_computes_what_it_did(network: str, fill: str) -> None:
    graph, model = graph_of(network), NETWORKS[network]()[0]
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    images = torch.randn(4, *graph.input_shape, generator=generator(0, "images"))
    cuts = [graph.slt(*step) for step in STEPS]
    training = network in ("resnet20", "densenet")  # the others have dropout
    changed = 0.0
    for number, (before, after) in enumerate(zip(cuts, cuts[1:], strict=False)):
        double = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        made = filled(graph, fill, before, after, double, generator(0, "fill", number))
        expected = outputs(graph, before, double, images, training)
        torch.testing.assert_close(outputs(graph, after, made, images, training), expected, rtol=1e-9, atol=1e-9)
        changed += float((outputs(graph, after, double, images, training) - expected).abs().max())
        state = made
    assert changed > 1e-4, "left as they were drawn, new channels do change it"
