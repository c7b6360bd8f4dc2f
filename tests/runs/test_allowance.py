"""What devices may hold: optimizers of the user's own are planned for, and whoever takes more is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from strata.core.errors import BadInput
from strata.execution import memory
from strata.methods import SLT, Small
from strata.planning import plan
from strata.runs.allowance import Allowance, verdict
from strata.training import LocalTraining, Workspace
from strata.training.memory import measured_bytes
from tests.federation import tiny
from tests.federation.tiny import tiny_run


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr / 10)


def unsteady(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Looks like plain SGD where it is asked for a single parameter, and is not."""
    return torch.optim.AdamW(parameters, lr) if len(parameters) > 1 else torch.optim.SGD(parameters, lr)


@pytest.mark.parametrize("name", ["slt", "small", "fjord"])
def test_an_optimizer_of_the_users_own_is_planned(name: str, tmp_path: Path) -> None:
    budgets = ["36 KiB", "48 KiB"] if name == "fjord" else ["42 KiB"]
    result = tiny_run(tmp_path / "run", method=name, budget=budgets, optimizer=adamw)
    assert result.summary["budget"]["over_bytes"] == 0
    assert result.summary["budget"]["accounting"] == "peak"
    assert "over_budget_bytes" not in result.metrics[0]


def test_a_plan_without_the_optimizer_is_refused_and_with_it_holds(tmp_path: Path) -> None:
    graph, training = tiny.graph(), LocalTraining(batch_size=8, optimizer=adamw)
    without = SLT(plan(graph, graph.input_shape, 8, budget="40 KiB", rounds=2))
    with pytest.raises(BadInput, match="keeps 2 tensors for each trained one, a step takes .* KiB: make the plan with"):
        tiny_run(tmp_path / "no", method=without, rounds=2, training=training)
    assert not (tmp_path / "no").exists()
    planned = SLT(plan(graph, graph.input_shape, budget="42 KiB", rounds=2, execution=training))
    result = tiny_run(tmp_path / "yes", method=planned, rounds=2, training=training)
    assert result.summary["peak_bytes"] <= 42 * 1024 and result.summary["budget"]["over_bytes"] == 0


def test_who_takes_more_than_the_budget_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tiny_run(tmp_path / "run", method="small", budget="40 KiB", optimizer=unsteady, progress=True)
    over = max(record.get("over_budget_bytes", 0) for record in result.metrics)
    assert result.summary["budget"] == {"bytes": [40 * 1024], "accounting": "peak", "over_bytes": over}
    assert over == result.summary["peak_bytes"] - 40 * 1024 > 0
    assert capsys.readouterr().err.count("WARNING: over the budget. In round 0 device") == 1
    assert "OVER THE BUDGET of 40.00 KiB by" in verdict(result.summary)


def test_the_papers_count_is_no_measure_of_true_bytes(tmp_path: Path) -> None:
    result = tiny_run(tmp_path / "run", method="small", constraint=0.5)
    budget = json.loads((tmp_path / "run" / "summary.json").read_text())["budget"]
    graph = tiny.graph()
    count = memory(graph, graph.prefix(0.5), LocalTraining(batch_size=8), "paper").total
    assert budget == {"bytes": [count], "accounting": "paper", "over_bytes": None}
    assert "which is not true bytes" in verdict(result.summary)


def test_each_device_is_held_against_its_own_level() -> None:
    allowance = Allowance((100, 200), "peak")
    assert allowance.excess({0: 100, 1: 200, 3: 150}) == (0, 0)
    assert allowance.excess({0: 130, 1: 210, 2: 90}) == (0, 30)
    assert Allowance((100,), "paper").excess({0: 130}) == (-1, 0)
    graph = tiny.graph()
    assert Allowance.of(Small(graph, constraints=(1.0,)), LocalTraining()) is None


class Wide(nn.Module):
    """A network of almost one parameter: what a step makes of it in passing is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(192, 400)
        self.top = nn.Linear(400, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.wide(x.flatten(1)).relu())
        return out


def test_what_a_step_makes_in_passing_is_counted() -> None:
    from strata.graph import ChannelGraph

    graph, training = ChannelGraph(Wide(), input_shape=(3, 8, 8)), LocalTraining(batch_size=2, optimizer=adamw)
    counted = memory(graph, graph.full(), training).total
    assert counted == pytest.approx(measured_bytes(Workspace(graph), graph.full(), training), rel=0.01)
