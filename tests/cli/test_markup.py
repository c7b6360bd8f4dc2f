"""A folder may be named like one of rich's tags: it is shown as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli import compare
from strata.fleet.output import show_status
from strata.fleet.server.status import FleetState, RunState
from strata.results.comparison import Row
from strata.results.curves import Curve
from strata.runs.progress import summarise
from strata.runs.session import Result

FOLDER = Path("[red]") / "x[/y]"
SUMMARY = {
    "method": "fd", "seed": 0, "accuracy": 0.5, "bn": "batch", "loss": 1.0, "per_class_accuracy": [0.5], "rounds": 1,
    "peak_bytes": 1, "upload_bytes": 1, "download_bytes": 1, "train_flops": 1, "dropped": 0, "seconds": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_in_the_closing_table(capsys: pytest.CaptureFixture[str]) -> None:
    summarise(Result(FOLDER, SUMMARY))
    shown = capsys.readouterr().out
    assert f"seed 0: {FOLDER}" in shown and f"{FOLDER}/model.safetensors" in shown


def test_under_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    compare.show([Row("fd", (0.5,), 1, 1, 1, 1, 1.0, Curve((1,), (0.5,), (None,), {}, 1))], FOLDER)
    assert f"picture: {FOLDER}/accuracy.png" in capsys.readouterr().out


def test_in_the_list_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    one = RunState("7", "completed", str(FOLDER), "fd", 1, None, 1.0, 0, 0, "")
    show_status(FleetState("localhost:8477", (), (one,)))
    assert str(FOLDER) in capsys.readouterr().out
