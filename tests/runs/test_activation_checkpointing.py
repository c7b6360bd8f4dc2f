"""Whole runs with activation checkpointing: the same model, other costs, and budgets that count what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.cli import main
from strata.core.errors import BadInput, Infeasible
from strata.core.files import read_json
from strata.execution import memory
from strata.methods.choice import method_named
from strata.runs.config import RunConfig
from strata.training import LocalTraining
from strata.training.memory import measured_bytes
from tests.federation.tiny import bits, graph, tiny_run, training
from tests.workspaces import workspace_of

torch.set_num_threads(1)  # as devices train

TWO = replace(training(), activation_checkpointing=2)


def test_same_model_and_costs_as_they_are(tmp_path: Path) -> None:
    # exact: several devices as one network would round otherwise
    tiny_run(tmp_path / "plain", "fedavg", rounds=2, exact=True)
    tiny_run(tmp_path / "low", "fedavg", rounds=2, exact=True, training=TWO)
    lines, weights = bits(tmp_path / "plain")
    low_lines, low_weights = bits(tmp_path / "low")
    assert weights == low_weights
    extra = workspace_of(graph()).recomputed_flops(graph().full(), TWO)
    assert extra > 0
    for plain, low in zip(map(as_record, lines), map(as_record, low_lines), strict=True):
        assert low.pop("train_flops") == plain.pop("train_flops") + 4 * 20 * extra  # 4 devices with 20 samples each
        assert low.pop("peak_bytes") < plain.pop("peak_bytes")
        assert low == plain
    settings = [read_json(tmp_path / name / "config.json")["settings"]["training"] for name in ("plain", "low")]
    assert settings[1] == {**settings[0], "activation_checkpointing": 2}
    assert "activation_checkpointing" not in settings[0], "as in folders of older versions, which stay resumable"
    with pytest.raises(BadInput, match="activation_checkpointing was 2 and is now null"):
        tiny_run(tmp_path / "low", "fedavg", rounds=2, exact=True, resume=True)


def as_record(line: str) -> dict[str, object]:
    record: dict[str, object] = json.loads(line + "}")
    return record


def test_older_requests_are_the_same_request() -> None:
    older = RunConfig.of(method="fedavg").to_json()
    assert "activation_checkpointing" not in older
    assert RunConfig.from_json(older) == RunConfig.of(method="fedavg")
    assert RunConfig.from_json({**older, "activation_checkpointing": None}) == RunConfig.of(method="fedavg")


def test_a_budget_is_held_against_what_a_device_will_measure() -> None:
    auto = replace(training(), activation_checkpointing="auto")
    need = memory(graph(), graph().full(), auto).total
    assert 0.99 * need <= measured_bytes(workspace_of(graph()), graph().full(), auto) <= 1.01 * need
    assert need < memory(graph(), graph().full(), training()).total

    def scale(name: str, budget: int, settings: LocalTraining) -> float:
        method = method_named(name, graph(), budgets=[budget], execution=settings)
        return method.constraints[0]  # type: ignore[attr-defined, no-any-return]

    assert scale("fedavg", need, auto) == 1
    with pytest.raises(Infeasible, match=rf"\({need:,} bytes\) with activation checkpointing auto.*, 1 B more than"):
        scale("fedavg", need - 1, auto)
    with pytest.raises(Infeasible, match="no device can hold it"):
        scale("fedavg", need, training())
    assert scale("small", need, auto) == 1 > scale("small", need - 1, auto)
    assert scale("small", need, training()) < 1


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["run", "--method", "fedavg", "--model", "tests.recorded.network:make", "--devices", "100",
              "--per-round", "1", "--rounds", "1", "--workers", "0", "--quiet", "--batch", "8"]  # fmt: skip
    assert main([*common, "--out", str(tmp_path / "a"), "--activation-checkpointing", "3"]) == 0
    assert read_json(tmp_path / "a" / "config.json")["settings"]["training"]["activation_checkpointing"] == 3
    for wrong in ("1", "many"):
        assert main([*common, "--out", str(tmp_path / "b"), "--activation-checkpointing", wrong]) == 2
        assert "auto or a number of segments from 2" in capsys.readouterr().err
    few = [*common, "--out", str(tmp_path / "b"), "--activation-checkpointing", "auto", "--budget", "64KiB"]
    assert main(few) == 3
    assert "more than the largest budget of 64.00 KiB" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
