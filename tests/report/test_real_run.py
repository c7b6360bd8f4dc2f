"""The report of a real run is whole."""

from __future__ import annotations

from pathlib import Path

from strata.data import load
from strata.report import write_report
from strata.runs.config import RunConfig
from strata.runs.launch import launch


def test_a_real_run_has_every_part(tmp_path: Path) -> None:
    config = RunConfig.of(
        method="fd", constraints=(0.125,), rounds=2, devices=100, per_round=2, partition="dirichlet:0.1", workers=0
    )
    launch(config, tmp_path / "run", progress=False)
    made = write_report([tmp_path / "run"], tmp_path / "report", with_figures=False)
    (group,) = made["groups"]
    assert group["status"] == "finished" and len(group["per_class"]) == 10 and made["problems"] == []
    assert group["parts"]["exact"] and len(group["parts"]["frames"]) == 2
    assert group["memory"]["budgets"] == [12_043_488]  # ResNet20 at 0.125, as in golden.yaml
    assert 0 < group["memory"]["steps"][0]["measured"] < 12_043_488
    counts = made["data"][0]["counts"]
    assert len(counts) == 100 and sum(map(sum, counts)) == len(load("digits").train)
