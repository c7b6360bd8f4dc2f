"""Budgets in bytes as width ratios, with golden.yaml's bytes for ResNet20."""

from __future__ import annotations

import pytest

from strata.core.errors import Infeasible
from strata.execution import Execution
from strata.methods import SLT, largest_scale
from strata.planning import plan
from tests.methods.tiny import tiny_graph
from tests.networks import graph_of


def test_the_scale_that_bytes_mean() -> None:
    graph = graph_of("resnet20")
    # 24,158,192 bytes: ResNet20 at 0.25, which has 4/8/16 channels; 0.265 is the last scale before floor(64 s) = 17
    assert largest_scale(graph, 24_158_192, Execution(), "paper") == 0.265
    assert largest_scale(graph, 24_158_191, Execution(), "paper") == 0.249
    assert largest_scale(graph, 98_370_512, Execution(), "paper") == 1.0
    in_parts = largest_scale(graph, 24_158_192, Execution(32, 8), "paper")  # the paper counts no waiting samples
    assert in_parts == largest_scale(graph, 24_158_192, Execution(8), "paper") > 0.8
    with pytest.raises(Infeasible, match="even one channel per layer needs"):
        largest_scale(graph, 100_000, Execution(), "paper")


def test_slt_on_a_real_plan() -> None:
    graph = tiny_graph()
    made = plan(graph, graph.input_shape, constraint=[0.5, 0.75], rounds=20)
    method = SLT(made)
    assert len(made.steps) > 1 and method.step(19) == len(made.steps) - 1
    weak, strong = (task.cut for task in method.assign(19, [0, 1]))
    assert weak == method.evaluation_cut(19) and weak.shapes == strong.shapes == graph.full().shapes
    assert weak.frozen > strong.frozen
