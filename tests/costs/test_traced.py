from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strata.costs import measure, memory, trace
from strata.costs.peak import peak
from strata.costs.rules import NoRule
from strata.cutting import ChannelGraph
from tests.costs.graphs import graph_of

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["resnet20", "mobilenet", "gated", "hf_resnet_bottleneck", "hf_convnext", "hf_vit"])
def test_tracing_agrees_with_real_training(name: str) -> None:
    graph = graph_of(name)
    third = graph.depth // 3
    for cut in (graph.full(), graph.slt(third, third + 1, 0.5)):
        model = graph.submodel(cut)
        measured = measure(model, graph.input_shape, 8, graph.classes).peak
        assert trace(model, graph.input_shape, 8, graph.classes) == pytest.approx(measured, rel=0.005)


class Unusual(nn.Module):
    """cumsum and cosine similarity: operators the closed form has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cumsum(self.stem(x).relu(), dim=2)
        return self.classifier(self.conv(x).logcumsumexp(3).relu().mean((2, 3)))


def test_an_operator_without_a_rule_is_traced() -> None:
    graph = ChannelGraph(Unusual(), (3, 16, 16))
    with pytest.raises(NoRule, match="cumsum"):
        peak(graph.sized(graph.full(), 8), 0, [])
    for cut in (graph.full(), graph.slt(1, 1, 0.5)):
        found = memory(graph, cut, 8, "peak")
        measured = measure(graph.submodel(cut), graph.input_shape, 8, graph.classes).peak
        assert 0.99 * measured <= found.total <= 1.03 * measured
        assert found.total == found.weights + found.gradients + found.activations


def test_tracing_allocates_nothing_and_leaves_the_module_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 62 * 62, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    huge = trace(model, (3, 64, 64), 1_000_000, 10)  # terabytes
    assert huge > 10**11
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
