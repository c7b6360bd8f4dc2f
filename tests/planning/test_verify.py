"""Real training steps in child processes, under real kernel limits."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.graph import ChannelGraph
from strata.models.loading import load_model
from strata.planning.make import plan
from strata.planning.plans import Plan
from strata.planning.trials import Say, in_fork
from strata.planning.verify import FULL, claim_of, verify

NETS = """
from torch import nn

def deep():
    layers = []
    for _ in range(6):
        layers += [nn.Conv2d(16 if layers else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
"""
MODEL = "strata_verify_nets:deep"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "strata_verify_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        graph = ChannelGraph(load_model(MODEL), input_shape=(3, 32, 32))
        whole = plan(graph, constraint=1.0, accounting="peak", batch_size=32).full_bytes
        yield plan(graph, budget=int(0.7 * whole), batch_size=32, name=MODEL)


def test_every_step_lives_and_the_whole_model_dies(deep: Plan) -> None:
    assert len(deep.steps) > 2
    assert claim_of(deep).margin_bytes <= 0.1 * deep.full_bytes
    *steps, whole = verify(deep, MODEL, None, hard_cap=True)
    assert [trial.step for trial in steps] == [step.step for step in deep.steps]
    for trial, step in zip(steps, deep.steps, strict=True):
        assert trial.predicted_bytes == step.memory_bytes
        assert trial.lived is True and trial.holds and trial.died_of is None
        assert -0.01 <= trial.difference <= 0.03
        assert trial.cap_bytes - trial.baseline_bytes == deep.budget_bytes + claim_of(deep).margin_bytes
    assert whole.step == FULL and whole.predicted_bytes == deep.full_bytes
    assert whole.lived is False and whole.holds and "allocate" in whole.died_of
    assert -0.01 <= whole.difference <= 0.03  # without the limit it trains


def test_a_false_claim_is_found_out(deep: Plan) -> None:
    claimed = replace(deep, budget_bytes=deep.budget_bytes // 4, steps=deep.steps[:1])
    (trial,) = verify(claimed, MODEL, None, hard_cap=True)
    assert trial.lived is False and not trial.holds


def test_without_a_cap_there_is_no_limit(deep: Plan) -> None:
    (trial,) = verify(replace(deep, steps=deep.steps[:1]), MODEL, None)
    assert trial.lived is None and trial.cap_bytes is None and trial.holds


def test_forks_report_how_they_end() -> None:
    def speaks(say: Say) -> None:
        say({"a": 1})
        say({"b": 2})

    def raises(say: Say) -> None:
        say({"a": 1})
        raise MemoryError("gone\naway")

    def killed(say: Say) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(speaks) == {"a": 1, "b": 2}
    assert in_fork(raises) == {"a": 1, "error": "MemoryError: gone away"}
    assert in_fork(killed) == {"error": "killed by SIGKILL"}
    assert torch.ones(2).sum() == 2  # and this process is none the worse


def test_a_model_that_cannot_be_made_again(deep: Plan, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the verifying process ended with code"):
        list(verify(deep, "strata_no_such_module:deep", None))
