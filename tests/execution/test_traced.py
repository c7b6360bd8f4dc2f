from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.execution import measure, measure_cut, memory, trace
from strata.execution.execution import Execution
from strata.execution.layout import submodel_as_trained
from strata.execution.simulated import peak
from strata.graph import ChannelGraph
from strata.ops import NoRule, operator_of, operators, registered
from tests.networks import graph_of

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["resnet20", "mobilenet", "gated", "hf_resnet_bottleneck", "hf_convnext", "hf_vit"])
def test_tracing_agrees_with_real_training(name: str) -> None:
    graph = graph_of(name)
    third = graph.depth // 3
    for cut in (graph.full(), graph.slt(third, third + 1, 0.5)):
        model, last = submodel_as_trained(graph, cut)
        step = (graph.inputs, Execution(8), graph.classes, None, last)
        assert trace(model, *step) == pytest.approx(measure(model, *step).peak, rel=0.005)


class Unusual(nn.Module):
    """Operators the closed form has no rule for; `overwrite`: one that works in place, which it cannot learn either."""

    def __init__(self, overwrite: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.classifier = nn.Linear(16, 10)
        self.overwrite = overwrite

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.stem(x))
        x = x.cumsum_(2) if self.overwrite else x.cumsum(2)
        x = self.conv(x)
        if not self.overwrite:
            x, _ = x.logcumsumexp(3).cummax(2)
        return self.classifier(functional.instance_norm(x).mean((2, 3)))


class OneHead(nn.Module):
    """Attention without a dim for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.classifier(x.mean(1))


def test_attention_without_heads_is_learned() -> None:
    graph = ChannelGraph(OneHead(), (24, 16))
    for cut in (graph.full(), graph.prefix(0.5)):
        measured = measure_cut(graph, cut, Execution(8)).peak
        assert 0.99 * measured <= memory(graph, cut, Execution(8)).total <= 1.03 * measured


@pytest.mark.parametrize("overwrite", [False, True])
def test_operators_without_a_rule_are_learned_or_traced(overwrite: bool) -> None:
    graph = ChannelGraph(Unusual(overwrite), (3, 16, 16))
    ops = graph.sized(graph.full(), 8)
    assert not all(operator_of(op.target).bytes for op in ops if op.kind == "op")
    if overwrite:
        with pytest.raises(NoRule, match="cumsum_"):
            peak(ops, 0, [], Execution())
    else:
        peak(ops, 0, [], Execution())
    for cut in (graph.full(), graph.prefix(0.5), graph.slt(1, 1, 0.5)):
        for batch in (8, 3):
            found = memory(graph, cut, Execution(batch), "peak")
            measured = measure_cut(graph, cut, Execution(batch)).peak
            assert 0.99 * measured <= found.total <= 1.03 * measured
            assert found.total == found.weights + found.gradients + found.activations


@pytest.mark.parametrize("name", ["resnet20", "gated", "hf_convnext", "hf_vit"])
def test_learned_rules_agree_with_the_written_ones(name: str) -> None:
    """Forget every rule but those of in-place operators: what is learned instead gives the same bytes."""
    graph = graph_of(name)
    third = graph.depth // 3
    forgotten = [
        replace(operator, bytes=None, bytes_for=())
        for operator in operators()
        if operator.names != ("getitem",) and not any(name.endswith("_") for name in operator.names)
    ]
    for cut in (graph.full(), graph.slt(third, third + 1, 0.5)):
        expected = memory(graph, cut, Execution(4), "peak").total
        with registered(*forgotten):
            assert memory(graph, cut, Execution(4), "peak").total == pytest.approx(expected, rel=0.01)


def test_tracing_allocates_nothing_and_leaves_the_module_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 62 * 62, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    huge = trace(model, (3, 64, 64), Execution(1_000_000), 10)  # terabytes
    assert huge > 10**11
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
