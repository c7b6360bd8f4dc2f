"""Whole runs whose steps are executed in the cheapest way that fits: workers, resuming, and bytes as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.core.errors import BadInput
from strata.core.files import read_json
from strata.execution import memory
from strata.runs import session
from strata.runs.config import RunConfig
from tests.federation.tiny import bits, graph, tiny_run, training

torch.set_num_threads(1)  # as devices train

LEANEST = replace(training(), micro_batch=4, activation_checkpointing="auto")


@cache
def part() -> int:
    """SLT needs several steps in it."""
    return int(0.85 * memory(graph(), graph().full(), LEANEST).total)


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["slt", "small"])
def test_the_same_bits_with_workers_and_within_the_budget(tmp_path: Path, method: str) -> None:
    asked: dict[str, Any] = {"method": method, "rounds": 4, "budget": part(), "lean": True}
    tiny_run(tmp_path / "here", **asked)
    tiny_run(tmp_path / "workers", workers=1, **asked)
    assert bits(tmp_path / "here") == bits(tmp_path / "workers")
    highest = max(record["peak_bytes"] for record in records(tmp_path / "here"))
    assert highest <= 1.01 * part()  # predictions are within -1 and +3 % of what is measured
    if method == "slt":
        steps = read_json(tmp_path / "here" / "plan.json")["steps"]
        assert any(step.get("execution", {}).get("micro_batch") == 4 for step in steps)
    else:
        described = read_json(tmp_path / "here" / "config.json")["settings"]["method"]
        assert described["executions"][0]["micro_batch"] == 4
    with pytest.raises(BadInput, match="other settings"):
        tiny_run(tmp_path / "here", resume=True, **{**asked, "lean": False, "budget": 4 * part()})


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"method": "slt", "rounds": 4, "budget": part(), "lean": True}
    tiny_run(tmp_path / "whole", **asked)
    play, calls = session.play, iter(range(10))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return play(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(session, "play", interrupted)
        tiny_run(tmp_path / "cut", **asked)
    tiny_run(tmp_path / "cut", resume=True, **asked)
    assert bits(tmp_path / "whole") == bits(tmp_path / "cut")


def test_settings_of_lean_runs() -> None:
    config = RunConfig.of(method="small", budgets=(10,), lean=True, max_flops=0.5)
    assert RunConfig.from_json(config.to_json()) == config
    assert "lean" not in RunConfig.of(method="small").to_json()
