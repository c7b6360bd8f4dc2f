from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.runs.folder import METRIC_KEYS, RunFolder, read_metrics

CONFIG = {"settings": {"rounds": 3, "method": {"name": "slt"}}, "versions": {"torch": "2"}}


def silent(text: str) -> None:
    raise AssertionError(text)


def record(round: int) -> dict:
    return {**dict.fromkeys(METRIC_KEYS, 0), "round": round}


def test_lines_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b", CONFIG, resume=False, say=silent)
    for round in range(4):
        folder.append(record(round))
    folder.sync()
    folder.close()
    path = tmp_path / "a" / "b" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 4, "st')  # killed in mid-line
    assert [r["round"] for r in read_metrics(path.parent)] == [0, 1, 2, 3]
    folder = RunFolder(path.parent, CONFIG, resume=True, say=silent)
    folder.truncate_metrics(2)
    folder.append(record(2))
    folder.close()
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_lost_lines_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    folder = RunFolder(tmp_path, CONFIG, resume=False, say=said.append)
    folder.append(record(0))
    folder.truncate_metrics(3)
    folder.close()
    assert said == ["metrics.jsonl holds only 1 of 3 rounds: the lines of the others are lost"]
    assert said[0] in (tmp_path / "run.log").read_text()


def test_what_comes_after_a_gap_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    folder = RunFolder(tmp_path, CONFIG, resume=False, say=said.append)
    for round in (0, 1, 5, 6, 7):  # 2 to 4 were lost, and that was said
        folder.append(record(round))
    folder.truncate_metrics(7)
    folder.close()
    assert [one["round"] for one in read_metrics(tmp_path)] == [0, 1, 5, 6]
    assert said == ["metrics.jsonl holds only 4 of 7 rounds: the lines of the others are lost"]


def test_refusals_leave_everything_as_it_was(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", CONFIG, resume=False, say=silent).close()
    before = (tmp_path / "run" / "config.json").read_bytes()
    other = {"settings": {"rounds": 5, "method": {"name": "fd"}}, "versions": {"torch": "2"}}
    with pytest.raises(BadInput, match="already holds a run: resume it"):
        RunFolder(tmp_path / "run", other, resume=False, say=silent)
    with pytest.raises(BadInput, match='method.name was "slt" and is now "fd"; rounds was 3 and is now 5'):
        RunFolder(tmp_path / "run", other, resume=True, say=silent)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    with pytest.raises(BadInput, match="no run to resume"):
        RunFolder(tmp_path / "nothing", CONFIG, resume=True, say=silent)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(BadInput, match="is not empty"):
        RunFolder(tmp_path / "full", CONFIG, resume=False, say=silent)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    with pytest.raises(BadInput, match="not a folder"):
        RunFolder(tmp_path / "full" / "thesis.tex", CONFIG, resume=False, say=silent)
    with pytest.raises(BadInput, match="cannot write"):
        RunFolder(Path("/proc/runs/a"), CONFIG, resume=False, say=silent)


def test_two_runs_on_one_folder_and_other_versions(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, CONFIG, resume=False, say=silent)
    with pytest.raises(BadInput, match="in use by another run"):
        RunFolder(tmp_path, CONFIG, resume=True, say=silent)
    first.close()
    said: list[str] = []
    RunFolder(tmp_path, {**CONFIG, "versions": {"torch": "3"}}, resume=True, say=said.append).close()
    assert said == ["this run was started with torch 2, now it is 3: the bits may differ"]
