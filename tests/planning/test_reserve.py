"""Library scratch within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.core.errors import BadInput, Infeasible
from strata.execution import memory, scratch_bytes
from strata.execution import scratch as scratches
from strata.execution.execution import Execution
from strata.graph import ChannelGraph, Cut
from strata.methods.choice import method_named
from strata.planning import plan
from strata.planning.reserve import reserving
from tests.federation import tiny


def some_scratch(graph: ChannelGraph, cut: Cut, execution: Execution) -> int:
    """As no library of this machine takes it, so that the sums are known."""
    return 3000 + 100 * len(cut.trained)


def test_it_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    graph, execution = tiny.graph(), Execution(4)
    assert scratches.known_scratch(graph, graph.full(), execution) is None
    found = scratch_bytes(graph, graph.full(), execution)
    assert found >= 0 and scratches.known_scratch(graph, graph.full(), execution) == found
    monkeypatch.setattr(scratches, "measure_cut", None)  # no second measurement
    assert scratch_bytes(graph, graph.full(), execution) == found
    assert scratches.known_scratch(graph, graph.prefix(0.5), execution) is None
    assert scratches.known_scratch(graph, graph.full(), Execution(5)) is None


def test_a_plan_leaves_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.planning.make.scratch_bytes", some_scratch)
    graph = tiny.graph()
    without = plan(graph, batch_size=8, budget="44 KiB", rounds=2)
    within = plan(graph, batch_size=8, budget="44 KiB", rounds=2, reserve="scratch")
    assert within.reserve == "scratch" and within.budget_bytes == without.budget_bytes == 44 * 1024
    assert within.to_json()["reserve"] == "scratch" and "reserve" not in without.to_json()
    for step in within.steps:
        assert step.memory_bytes + 3000 + 100 * len(within.cut(step.step).trained) <= 44 * 1024
    assert max(s.memory_bytes for s in without.steps) > max(s.memory_bytes for s in within.steps)


def test_a_width_leaves_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.methods.choice.scratch_bytes", lambda *_: 12 * 1024)
    graph, execution = tiny.graph(), Execution(8)
    within = method_named("small", graph, budgets=["40 KiB"], execution=execution, reserve="scratch")
    assert within == method_named("small", graph, budgets=["28 KiB"], execution=execution)
    assert within != method_named("small", graph, budgets=["40 KiB"], execution=execution)


def test_lean_executions_leave_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step with the scratch of its own execution: here, so much for every sample that is taken at a time."""

    def by_samples(graph: ChannelGraph, cut: Cut, execution: Execution) -> int:
        return 512 * execution.at_once

    for place in ("planning.make", "methods.choice"):
        monkeypatch.setattr(f"strata.{place}.scratch_bytes", by_samples)
    graph, size = tiny.graph(), 44 * 1024
    without = plan(graph, batch_size=32, budget=size, rounds=2, lean=True)
    within = plan(graph, batch_size=32, budget=size, rounds=2, lean=True, reserve="scratch")
    executions = [within.execution_at(step.step) for step in within.steps]
    totals = [step.memory_bytes + 512 * one.at_once for step, one in zip(within.steps, executions, strict=True)]
    assert max(totals) <= size < max(step.memory_bytes + 512 * 32 for step in without.steps)

    for name in ("small", "window", "auto"):
        made = method_named(
            name, graph, budgets=[size], execution=Execution(32), lean=name != "auto", reserve="scratch"
        )
        found: list[int] = []

        def total(cut: Cut, execution: Execution | None, found: list[int] = found) -> int:
            own = execution or Execution(32)
            found.append(memory(graph, cut, own).total + by_samples(graph, cut, own))
            return found[-1]

        assert made.most_executed(total) == [max(found)] and max(found) <= size, name


def test_what_makes_no_sense_is_one_sentence() -> None:
    graph = tiny.graph()
    with pytest.raises(BadInput, match="counts true bytes: give a --budget"):
        plan(graph, constraint=0.5, reserve="scratch")
    with pytest.raises(BadInput, match="can reserve scratch, not 'disk'"):
        plan(graph, budget="44 KiB", reserve="disk")
    with pytest.raises(Infeasible, match="leaves too little of 100 B for a step"):
        reserving([100], lambda sizes: sizes[0], lambda made: [made + 101])
