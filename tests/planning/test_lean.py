"""The joint search over cuts and executions: the widest model, the whole model and SLT's steps, each by the cheapest
execution that fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

import strata
from strata.core.errors import BadInput, Infeasible
from strata.execution import Execution, flops, memory, traffic
from strata.graph import ChannelGraph
from strata.methods import Budget
from strata.methods.choice import method_named
from strata.planning import Plan
from strata.planning.choosing import Ceilings, Chooser
from strata.planning.executions import candidates, leaner
from tests.methods.tiny import tiny_graph
from tests.networks import paper_graph

MIB = 2**20
STEP = Execution(16)


def grouped() -> ChannelGraph:
    """Without batch norm."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return ChannelGraph(model, input_shape=(3, 8, 8))


def test_candidates_under_batch_norm_end_at_four_samples() -> None:
    found = candidates(tiny_graph(), Execution(32))
    told = [(one.micro_batch, one.activation_checkpointing) for one in found if one == levers_only(one)]
    assert told == [(size, how) for size in (None, 16, 8, 4) for how in (None, "auto")]


def levers_only(one: Execution) -> Execution:
    return Execution(one.batch_size, one.micro_batch, one.activation_checkpointing)


def test_without_batch_norm_parts_are_exact_and_come_before_recomputation() -> None:
    found = [one for one in candidates(grouped(), Execution(8)) if one == levers_only(one)]
    assert {one.micro_batch for one in found} == {None, 4, 2, 1}
    assert found.index(Execution(8, 4)) < found.index(Execution(8, None, "auto"))


def test_what_was_asked_for_stays() -> None:
    asked = Execution(32, 8, "auto", momentum=0.5)
    found = candidates(tiny_graph(), asked)
    assert found[0] == asked
    assert all(one.activation_checkpointing == "auto" and one.momentum == 0.5 for one in found)
    assert {one.micro_batch for one in found} == {8, 4}


def test_no_part_of_a_batch_is_too_small_for_batch_norm() -> None:
    # 31 in parts of 4 ends with 3 samples
    assert {one.micro_batch for one in candidates(tiny_graph(), Execution(31))} == {None, 16, 8}


def test_leaner_ones_need_no_more() -> None:
    graph = tiny_graph()
    found = candidates(graph, Execution(32))
    need = {one: memory(graph, graph.full(), one).total for one in found}
    pairs = [(one, other) for one in found for other in found if leaner(one, other)]
    assert len(pairs) > len(found)
    assert all(need[one] <= 1.01 * need[other] for one, other in pairs)  # places are within one percent of the lowest


@pytest.mark.parametrize(
    ("mib", "execution"),
    [
        (51.2, Execution()),
        (19.8, Execution(activation_checkpointing="auto")),
        (8.1, Execution(micro_batch=8, activation_checkpointing="auto")),
        (5.9, Execution(micro_batch=4, activation_checkpointing="auto")),
    ],
)
def test_the_whole_resnet20_by_the_cheapest_execution(mib: float, execution: Execution) -> None:
    """The table of what is known: 51.2, recomputed 19.7; in parts of 8 and 4 with recomputation 8.0 and 5.9 MiB."""
    graph = paper_graph("ResNet20")
    chooser = Chooser(
        graph, [Execution(micro_batch=m, activation_checkpointing=c) for m in (None, 16, 8, 4) for c in (None, "auto")]
    )
    assert chooser.fitting(graph.full(), int(mib * MIB)) == execution


def test_widths_grow_with_the_budget_and_each_fits() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    before = 0.0
    for share in (0.15, 0.3, 0.6, 1.0):
        budget = int(share * whole)
        method = method_named("small", graph, budgets=[budget], execution=STEP, lean=True)
        (scale,) = method.constraints  # type: ignore[attr-defined]
        assert scale >= before
        before = scale
        execution = (method.executions or (STEP,))[0] or STEP
        assert memory(graph, graph.prefix(scale), execution).total <= budget
        plain = method_named("small", graph, budgets=[budget], execution=STEP) if share > 0.3 else None
        assert plain is None or plain.constraints[0] <= scale  # type: ignore[attr-defined]
    assert before == 1.0 and method.executions == ()  # the whole model fits as it is: nothing is turned


def test_a_method_of_ones_own_gets_its_execution() -> None:
    graph = tiny_graph()
    need = memory(graph, graph.full(), replace(STEP, micro_batch=4, activation_checkpointing="auto")).total
    method = method_named("fedavg", graph, budgets=[need], execution=STEP, lean=True)
    (task,) = method.assign(0, [0])
    (phase,) = task.phases
    assert phase.execution is not None and memory(graph, phase.cut, phase.execution).total <= need
    with pytest.raises(Infeasible):
        method_named("fedavg", graph, budgets=[need // 2], execution=STEP, lean=True)


def lean_plan(graph: ChannelGraph, *budgets: int) -> Plan:
    return strata.plan(graph, budget=budgets, execution=STEP, rounds=40, lean=True)


def test_every_step_of_slt_is_within_the_budget_by_its_own_execution() -> None:
    graph = tiny_graph()
    lean = replace(STEP, micro_batch=4, activation_checkpointing="auto")
    budget = int(0.8 * memory(graph, graph.full(), lean).total)
    plan = lean_plan(graph, budget)
    assert len(plan.steps) > 1
    for number, step in enumerate(plan.steps):
        execution = plan.execution_at(number)
        counted = memory(graph, plan.cut(number), execution)
        assert counted.total == step.memory_bytes <= budget
        assert step.train_flops_per_sample == flops(graph, plan.cut(number), execution).real_train
    assert any(step.execution for step in plan.steps)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())), graph)
    assert again == plan and again.hash == plan.hash
    assert again.hash != replace(plan, steps=tuple(replace(s, execution=None) for s in plan.steps)).hash
    shown = [step.get("execution") for step in plan.to_json()["steps"]]
    assert [one is None for one in shown] == [step.execution is None for step in plan.steps]
    assert "in parts of 4" in str(plan)


def test_levels_have_executions_of_their_own() -> None:
    graph = tiny_graph()
    lean = replace(STEP, micro_batch=4, activation_checkpointing="auto")
    weak = int(0.8 * memory(graph, graph.full(), lean).total)
    plan = lean_plan(graph, weak, 4 * weak)
    for level, size in enumerate((weak, 4 * weak)):
        for step in range(len(plan.steps)):
            need = memory(graph, plan.cut(step, level), plan.execution_at(step, level)).total
            assert need <= size
    assert Plan.from_json(plan.to_json(), graph) == plan


def test_ceilings_hold() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    plain = flops(graph, graph.full()).real_train
    half = traffic(graph, graph.full()).upload // 2
    found = Chooser(graph, candidates(graph, STEP), ceilings=Ceilings(0.5, half))
    budget = Budget(STEP, sizes=(whole,), lean=True, ceilings=Ceilings(0.5, half))
    scale = budget.widest(graph, whole)
    cut = graph.prefix(scale)
    execution = found.fitting(cut, whole)
    assert scale < 1 and execution is not None
    assert traffic(graph, cut).upload <= half and flops(graph, cut, execution).real_train <= 0.5 * plain
    assert found.fitting(graph.full(), whole) is None


def test_lean_needs_bytes() -> None:
    for asked in ({"constraints": [0.5]}, {"budgets": ["1MiB"], "accounting": "paper"}):
        with pytest.raises(BadInput, match="give a budget"):
            method_named("small", tiny_graph(), lean=True, **asked)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="give a budget"):
        strata.plan(tiny_graph(), constraint=0.5, lean=True)
