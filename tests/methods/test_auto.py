"""`--method auto`: the recommendation, as the method that it is; and refusals that name what fits."""

from __future__ import annotations

import pytest
import torch

from strata.core.errors import BadInput, Infeasible
from strata.core.sizes import show_bytes
from strata.execution import Execution, memory
from strata.methods import FedAvg, Small
from strata.methods.choice import method_named
from tests.methods.tiny import tiny_graph

torch.set_num_threads(1)
STEP = Execution(16)


def test_auto_becomes_what_is_recommended() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    plain = method_named("auto", graph, budgets=[whole], execution=STEP)
    assert isinstance(plain, FedAvg) and plain.executions == ()
    lean = memory(graph, graph.full(), Execution(16, 4, "auto")).total
    assert method_named("auto", graph, budgets=[lean], execution=STEP) == method_named(
        "fedavg", graph, budgets=[lean], execution=STEP, lean=True
    )
    released = Execution(16, 4, "auto", release_gradients=True)
    tight = int(0.9 * memory(graph, graph.full(), released).total)
    small = method_named("auto", graph, budgets=[tight], execution=STEP)
    assert isinstance(small, Small) and small.constraints[0] < 1
    assert small == method_named("small", graph, budgets=[tight], execution=STEP, lean=True)
    with pytest.raises(Infeasible, match="smallest budget that would do"):
        method_named("auto", graph, budgets=["100B"], execution=STEP)
    with pytest.raises(BadInput, match="auto chooses by bytes"):
        method_named("auto", graph, constraints=[0.5], execution=STEP)


def test_refusals_name_the_ways_that_fit() -> None:
    graph = tiny_graph()
    lean = memory(graph, graph.full(), Execution(16, 4, "auto")).total
    with pytest.raises(Infeasible) as refused:
        method_named("fedavg", graph, budgets=[lean], execution=STEP)
    way = "fedavg at the whole model, with --micro-batch 4 --activation-checkpointing auto"
    assert f"within {show_bytes(lean)}: {way}" in str(refused.value)
    with pytest.raises(Infeasible, match="nothing else fits either"):
        method_named("small", graph, budgets=["100B"], execution=STEP)
