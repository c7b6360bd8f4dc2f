"""Parameter counts and layer counts of the paper's networks, and of those for which parameters dominate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from strata.execution import Execution, measure_cut, memory
from strata.graph import ChannelGraph, Cut
from strata.models import densenet40, resnet18, resnet18_gn, resnet20, resnet44, resnet56
from tests.golden import golden
from tests.networks import paper_graph

COUNTS = [
    (resnet20, 10, 32, 294_874),
    (resnet44, 200, 64, 886_168),
    (resnet56, 1000, 64, 1_900_600),
    (densenet40, 100, 32, 188_092),
    (resnet18, 10, 32, 11_173_962),
    (resnet18_gn, 10, 32, 11_173_962),
]


@pytest.mark.parametrize(("make", "classes", "size", "parameters"), COUNTS)
def test_counts(make: Callable[..., nn.Module], classes: int, size: int, parameters: int) -> None:
    model = make(num_classes=classes, image_size=size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, 3, size, size)).shape == (2, classes)


@pytest.mark.parametrize(("name", "depth"), [("ResNet20", 19), ("ResNet44", 43), ("ResNet56", 55), ("DenseNet40", 39)])
def test_layers(name: str, depth: int) -> None:
    assert paper_graph(name).depth == depth


def count(cut: Cut, names: tuple[str, ...]) -> int:
    return sum(torch.Size(cut.shapes[name]).numel() for name in names)


@pytest.mark.parametrize("name", ["ResNet20", "ResNet44", "DenseNet40"])
def test_trained_and_whole_submodel_parameters_of_every_step(name: str) -> None:
    """Which parameters belong to which layer, and how wide each layer is: the published scales, counted."""
    graph = paper_graph(name)
    for key, row in golden()["schedules"].items():
        if not key.startswith(name):
            continue
        scales = golden()["configs"][key]["s_json"]
        steps = [graph.slt(n, n + 1, scale) for n, scale in enumerate(scales)]
        assert [count(c, c.trained) for c in [graph.slt(0, 0, scales[0]), *steps]] == row["trained_params"]
        assert [count(c, graph.parameter_names) for c in steps] == row["submodel_params"]
    for key, row in golden()["cost"].items():
        if key.startswith(name) and key.endswith("small_FD_FedRolex"):
            cut = graph.prefix(float(key.split("@")[1].split("|")[0]))
            assert count(cut, graph.parameter_names) == row["params"]


@pytest.mark.parametrize("make", [resnet18, resnet18_gn])
def test_parameters_dominate_in_resnet18(make: Callable[..., nn.Module]) -> None:
    graph = ChannelGraph(make(), (3, 32, 32))
    assert graph.depth == 17 and not graph.pinned
    quarter, head = graph.prefix(0.25), graph.slt(16, 17, 0.25)
    assert count(quarter, graph.parameter_names) < 0.15 * count(graph.full(), graph.parameter_names)
    execution = Execution(2)
    for cut in (quarter, head):
        predicted = memory(graph, cut, execution).total
        assert 0.99 <= predicted / measure_cut(graph, cut, execution).peak <= 1.03
    whole = memory(graph, graph.full(), execution)
    assert whole.weights + whole.gradients > whole.total / 2
