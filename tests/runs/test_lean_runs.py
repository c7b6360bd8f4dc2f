"""Whole runs that keep less: the same model where it says so, whatever the method, and the same in worker processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.core.files import read_json
from strata.runs.config import RunConfig
from tests.federation.tiny import bits, tiny_run, training

torch.set_num_threads(1)  # as devices train

SAME_BITS = replace(training(), release_gradients=True, frozen_weights="mapped", activation_checkpointing=2)
OTHERS = replace(training(), frozen_chunk=3, frozen_weights="mapped", momentum_dtype="bfloat16", micro_batch=5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", ["slt", "fedrolex"])
def test_the_same_model_in_fewer_bytes(tmp_path: Path, method: str, exact: bool) -> None:
    """As each device takes its steps, and by the shorter way of simulation."""
    tiny_run(tmp_path / "plain", method, rounds=2, exact=exact)
    tiny_run(tmp_path / "lean", method, rounds=2, exact=exact, training=SAME_BITS)
    lines, weights = bits(tmp_path / "plain")
    lean_lines, lean_weights = bits(tmp_path / "lean")
    assert weights == lean_weights
    for plain, lean in zip(map(as_record, lines), map(as_record, lean_lines), strict=True):
        assert lean["train_loss"] == plain["train_loss"] and lean["peak_bytes"] < plain["peak_bytes"]
    told = read_json(tmp_path / "lean" / "config.json")["settings"]["training"]
    assert (told["release_gradients"], told["frozen_weights"]) == (True, "mapped")
    assert "frozen_chunk" not in told, "as in folders of older versions, which stay resumable"


def test_the_same_bits_in_worker_processes(tmp_path: Path) -> None:
    for workers in (0, 2):
        tiny_run(tmp_path / str(workers), "slt", rounds=2, workers=workers, training=OTHERS)
    assert bits(tmp_path / "0") == bits(tmp_path / "2")


def test_flags() -> None:
    flags = {"frozen_chunk": 4, "release_gradients": True, "momentum_dtype": "bfloat16", "frozen_weights": "mapped"}
    config = RunConfig.of(method="slt", constraints=(0.5,), **flags)
    assert all(getattr(config.execution, name) == value for name, value in flags.items())
    assert RunConfig.from_json(config.to_json()) == config
    plain = RunConfig.of(method="slt", constraints=(0.5,)).to_json()
    assert not set(flags) & set(plain)


def as_record(line: str) -> dict[str, float]:
    record: dict[str, float] = json.loads(line + "}")
    return record
