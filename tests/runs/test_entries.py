"""A comparison of methods with settings of their own for how steps are taken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.results.groups import group_runs
from strata.results.reading import find_runs
from strata.runs.config import RunConfig
from strata.runs.entries import Entry, execution_text


@pytest.mark.parametrize(
    ("text", "method", "settings", "name", "folder"),
    [
        ("slt", "slt", {}, "slt", "slt"),
        (
            "fedavg:micro-batch=8+recompute",
            "fedavg",
            {"micro_batch": 8, "activation_checkpointing": "auto"},
            "fedavg:micro-batch=8+recompute",
            "fedavg-micro-batch-8-recompute",
        ),
        ("small:batch=16", "small", {"batch": 16}, "small:batch=16", "small-batch-16"),
        ("my.methods:Mine", "my.methods:Mine", {}, "my.methods:Mine", "my.methods:Mine"),
        (
            "my.methods:Mine:momentum=0",
            "my.methods:Mine",
            {"momentum": 0.0},
            "my.methods:Mine:momentum=0.0",
            "my.methods:Mine-momentum-0.0",
        ),
    ],
)
def test_an_entry(text: str, method: str, settings: dict[str, object], name: str, folder: str) -> None:
    entry = Entry.of(text)
    assert (entry.method, dict(entry.settings), entry.name, entry.folder) == (method, settings, name, folder)
    assert Entry.of(entry.name) == entry
    config = entry.of_config(RunConfig())
    assert config.method == method and all(getattr(config, key) == value for key, value in settings.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fedavg:shrink", "asks for 'shrink', and a step is taken by recompute or batch, micro-batch"),
        ("fedavg:micro-batch", "gives micro-batch no value"),
        ("fedavg:micro-batch=x", "must be a whole number"),
        ("fedavg:recompute:micro-batch=8", "an entry is METHOD:SETTING"),
    ],
)
def test_what_is_no_entry(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Entry.of(text)


def test_as_a_folder_tells_it() -> None:
    assert execution_text({"batch_size": 32, "micro_batch": None}) == ""
    assert execution_text({"batch_size": 8, "activation_checkpointing": "auto"}) == "batch=8+recompute"


def test_a_comparison_of_executions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["--model", "small_net:net", "--rounds", "1", "--devices", "40", "--per-round", "1", "--workers", "0"]
    asked = ["compare", *common, "--methods", "fedavg,fedavg:micro-batch=8", "--out", "cmp", "--quiet"]
    assert main(asked) == 0
    rows = json.loads((tmp_path / "cmp" / "summary.json").read_text())
    assert [row["method"] for row in rows] == ["fedavg", "fedavg:micro-batch=8"]
    assert rows[1]["peak_bytes"] < rows[0]["peak_bytes"]
    saved = tmp_path / "cmp" / "fedavg-micro-batch-8" / "seed-0"
    assert json.loads((saved / "config.json").read_text())["request"]["micro_batch"] == 8
    before = os.stat(saved / "summary.json").st_mtime_ns
    assert main(asked) == 0 and os.stat(saved / "summary.json").st_mtime_ns == before  # finished: nothing to do
    labels = {group.label for group in group_runs(find_runs(["cmp"]))}
    assert labels == {"fedavg", "fedavg · micro-batch=8"}


NET = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
"""


def test_from_python(tmp_path: Path) -> None:
    import strata
    from strata.training import LocalTraining
    from tests.federation import tiny

    def again() -> list[strata.results.comparison.Row]:
        return strata.compare(
            tiny.model(), tiny.data(), ["fedavg", "fedavg:micro-batch=4"], out=tmp_path / "cmp", seeds=2, rounds=1,
            devices=12, per_round=2, workers=0, progress=False, training=LocalTraining(batch_size=8),
        )  # fmt: skip

    whole, lean = again()
    assert (whole.method, lean.method) == ("fedavg", "fedavg:micro-batch=4") and len(lean.accuracies) == 2
    assert lean.peak_bytes < whole.peak_bytes
    assert (tmp_path / "cmp" / "fedavg-micro-batch-4" / "seed-1" / "summary.json").exists()
    assert [row.to_json() for row in again()] == [whole.to_json(), lean.to_json()]
    with pytest.raises(BadInput, match="at least one method"):
        strata.compare(tiny.model(), tiny.data(), [], out=tmp_path / "none")
