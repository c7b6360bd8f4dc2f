"""An operator of the user's own: unknown first, then taught, then like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.execution import Execution, flops, measure_cut, memory
from strata.graph import ChannelGraph
from strata.ops import (
    Count,
    Operator,
    RuleFailed,
    SamplesApart,
    Simulation,
    SizedOp,
    Value,
    elementwise,
    operator_of,
    registered,
)
from strata.training.chunked import Chunked, NotChunkable
from tests.graph.reference import assert_equals_zeroed


@torch.library.custom_op("strata_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def backward_of_cube(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 3 * x * x * gradient


cube.register_autograd(backward_of_cube, setup_context=keep_input)


def cube_bytes(sim: Simulation, op: SizedOp, x: Value) -> Value:
    y = sim.new(op.shape, x.itemsize)
    sim.passing(x.bytes)

    def backward(sim: Simulation, gradients: Any) -> Any:
        result = sim.new(x.shape, x.itemsize)
        sim.passing(x.bytes)
        return [result]

    sim.record([x], y, [x], backward)
    return y


CUBE = Operator(
    ("strata_tests::cube",),
    channels=elementwise,
    bytes=cube_bytes,
    flops=lambda op, x: Count(7, 21),
    samples_apart=SamplesApart.ALWAYS,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)
        self.classifier = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv2(cube(self.conv1(x))).mean((2, 3)))


EIGHT = Execution(8)
SHAPE = (3, 8, 8)


def test_before_it_is_taught_it_stays_whole_and_is_learned() -> None:
    graph = ChannelGraph(Net(), SHAPE)
    assert [pinned.op for pinned in graph.pinned] == ["strata_tests.cube.default"]
    cut = graph.prefix(0.25)
    assert cut.shapes["conv1.weight"] == (16, 3, 3, 3)
    assert memory(graph, cut, EIGHT).total == measure_cut(graph, cut, EIGHT).peak
    with pytest.raises(NotChunkable, match="cube"):
        Chunked(graph, cut)


def test_taught_it_is_cut_counted_and_computed_in_parts() -> None:
    with registered(CUBE):
        torch.manual_seed(3)
        model = Net().double()
        graph = ChannelGraph(model, SHAPE)
        assert not graph.pinned
        for cut in (graph.prefix(0.25), graph.random(0.5, torch.Generator().manual_seed(1)), graph.slt(1, 2, 0.5)):
            assert_equals_zeroed(model, graph, cut)
        single = ChannelGraph(Net(), SHAPE)
        for cut in (single.full(), single.prefix(0.25), single.slt(1, 1, 0.5)):
            assert memory(single, cut, EIGHT).total == measure_cut(single, cut, EIGHT).peak
        cut = single.prefix(0.25)
        assert cut.shapes["conv1.weight"] == (4, 3, 3, 3)
        with registered(Operator(CUBE.names, channels=elementwise, flops=lambda op, x: Count())):
            without = flops(single, cut)
        assert flops(single, cut).forward - without.forward == 7 // 2  # rules count batches of two
        Chunked(graph, graph.full())
    assert operator_of(torch.ops.strata_tests.cube.default).channels is None


def test_a_mistake_in_its_rule_shows_with_its_name() -> None:
    def broken(p: Any, node: Any) -> Tensor:
        return p.label(node, 1, p.along(node.args[7], 1))

    with registered(Operator(CUBE.names, channels=broken)), pytest.raises(RuleFailed, match="strata_tests.cube"):
        ChannelGraph(Net(), SHAPE)


def test_a_mistake_in_a_byte_or_flop_rule_shows_with_its_name() -> None:
    graph = ChannelGraph(Net(), SHAPE)
    with registered(Operator(CUBE.names, bytes=lambda sim, op: None, flops=lambda op: Count())):
        with pytest.raises(RuleFailed, match=r"byte rule of strata_tests.cube.default failed: TypeError"):
            memory(graph, graph.full(), EIGHT)
        with pytest.raises(RuleFailed, match=r"FLOP rule of strata_tests.cube.default failed: TypeError"):
            flops(graph, graph.full())
