from __future__ import annotations

import pytest
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution import memory
from strata.execution.execution import Execution
from strata.graph import ChannelGraph
from tests.golden import golden
from tests.networks import graph_of, paper_graph


@pytest.mark.parametrize("key", golden()["memory"])
def test_golden_memory(key: str) -> None:
    network, scale = key.split("@")
    expected = golden()["memory"][key]
    for classes, row in ((None, "A_all_leaf"), (10, "A_all_leaf_c10")):
        graph = paper_graph(network, classes)
        assert memory(graph, graph.prefix(float(scale)), Execution(32), "paper").total == expected[row]


def test_resnet20_by_the_closed_form_of_the_golden_file() -> None:
    """(8n+3) A1 + (8n+1) (A2+A3) + 2 c3 (H/16)^2 + C outputs per sample, n = 3."""
    graph = graph_of("resnet20")
    first, second, third = 16 * 32 * 32, 32 * 16 * 16, 64 * 8 * 8
    outputs = 27 * first + 25 * (second + third) + 2 * 64 * 2 * 2 + 10
    found = memory(graph, graph.full(), Execution(7), "paper")
    assert found.activations == 4 * 7 * outputs
    assert found.weights == found.gradients == 4 * 294_874
    assert found.total == found.activations + found.weights + found.gradients


def test_frozen_layers_have_no_activations_and_no_gradients() -> None:
    graph = graph_of("resnet20")
    only_classifier = memory(graph, graph.slt(graph.depth, graph.depth, 1.0), Execution(32), "paper")
    assert only_classifier.activations == 4 * 32 * 10
    assert only_classifier.gradients == 4 * (256 * 10 + 10)
    assert only_classifier.weights == 4 * 294_874


@pytest.mark.parametrize("in_place", [False, True])
def test_an_activation_in_place_counts_once(in_place: bool) -> None:
    """Two samples: 8 maps of 6x6 and of 4x4, each twice, a pool and a flatten of 8, 4 classes."""
    relu = nn.ReLU(in_place)
    layers = [nn.Conv2d(3, 8, 3), relu, nn.Conv2d(8, 8, 3), nn.ReLU(in_place), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    graph = ChannelGraph(nn.Sequential(*layers, nn.Linear(8, 4)), (3, 8, 8))
    assert 4 * 2 * (2 * 8 * 36 + 2 * 8 * 16 + 8 + 8 + 4) == 6816
    assert memory(graph, graph.full(), Execution(2), "paper").activations == 6816


def test_an_identity_after_an_activation_in_place_counts_again() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(True), nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    graph = ChannelGraph(nn.Sequential(*layers), (3, 8, 8))
    assert memory(graph, graph.full(), Execution(2), "paper").activations == 4 * 2 * (3 * 8 * 36 + 8 + 8 + 4)


def test_every_tensor_that_a_leaf_returns_counts() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.classifier = (
                nn.Linear(5, 16),
                nn.LSTM(16, 16, batch_first=True),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.lstm(self.embed(x))[0].mean(1))

    graph = ChannelGraph(Recurrent(), (9, 5))
    embedded, outputs, last_and_cell = 9 * 16, 9 * 16, 2 * 16
    assert memory(graph, graph.full(), Execution(2), "paper").activations == 4 * 2 * (
        embedded + outputs + last_and_cell + 4
    )


def test_bad_input() -> None:
    graph = graph_of("resnet20")
    with pytest.raises(BadInput, match="one of paper, peak"):
        memory(graph, graph.full(), Execution(32), "papr")
    with pytest.raises(BadInput, match="at least 1"):
        memory(graph, graph.full(), Execution(0), "peak")
