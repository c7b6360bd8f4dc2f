from __future__ import annotations

import pytest

from strata.costs import memory
from strata.errors import BadInput
from tests.golden import golden
from tests.networks import graph_of, paper_graph


@pytest.mark.parametrize("key", golden()["memory"])
def test_golden_memory(key: str) -> None:
    network, scale = key.split("@")
    expected = golden()["memory"][key]
    for classes, row in ((None, "A_all_leaf"), (10, "A_all_leaf_c10")):
        graph = paper_graph(network, classes)
        assert memory(graph, graph.prefix(float(scale)), 32, "paper").total == expected[row]


def test_resnet20_by_the_closed_form_of_the_golden_file() -> None:
    """(8n+3) A1 + (8n+1) (A2+A3) + 2 c3 (H/16)^2 + C outputs per sample, n = 3."""
    graph = graph_of("resnet20")
    first, second, third = 16 * 32 * 32, 32 * 16 * 16, 64 * 8 * 8
    outputs = 27 * first + 25 * (second + third) + 2 * 64 * 2 * 2 + 10
    found = memory(graph, graph.full(), 7, "paper")
    assert found.activations == 4 * 7 * outputs
    assert found.weights == found.gradients == 4 * 294_874
    assert found.total == found.activations + found.weights + found.gradients


def test_frozen_layers_have_no_activations_and_no_gradients() -> None:
    graph = graph_of("resnet20")
    only_classifier = memory(graph, graph.slt(graph.depth, graph.depth, 1.0), 32, "paper")
    assert only_classifier.activations == 4 * 32 * 10
    assert only_classifier.gradients == 4 * (256 * 10 + 10)
    assert only_classifier.weights == 4 * 294_874


def test_bad_input() -> None:
    graph = graph_of("resnet20")
    with pytest.raises(BadInput, match="one of paper, peak"):
        memory(graph, graph.full(), 32, "papr")
    with pytest.raises(BadInput, match="at least 1"):
        memory(graph, graph.full(), 0, "peak")
