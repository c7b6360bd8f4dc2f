from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.runs.folder import RunFolder
from strata.runs.metrics import METRIC_KEYS, read_metrics

CONFIG = {"settings": {"rounds": 3, "method": {"name": "slt"}}, "versions": {"torch": "2"}}


def silent(text: str) -> None:
    raise AssertionError(text)


def record(round: int) -> dict:
    return {**dict.fromkeys(METRIC_KEYS, 0), "round": round, "devices": [], "dropped": []}


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


DAMAGE = {
    "a key": (b'"upload_bytes"', b'"upload_cytes"'),
    "a bracket": (b'{"round": 3', b'{"roun d": 3'),
    "a number's type": (b'"peak_bytes": 0', b'"peak_bytes": "'),
    "the round, lower": (b'"round": 3', b'"round": 1'),
    "the round, higher": (b'"round": 3', b'"round": 7'),
    "the round, a fraction": (b'"round": 3', b'"round": 3.0'),
    "no object": (b"{", b"["),
    "too deep": (b"{", b"[" * 100_000),
    "not UTF-8": (b'"seconds"', b'"second\xf3"'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_one_damaged_line_costs_no_other(tmp_path: Path, kind: str) -> None:
    said: list[str] = []
    folder = RunFolder(tmp_path, CONFIG, resume=False, say=said.append)
    for round in range(8):
        folder.append(record(round))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(*DAMAGE[kind], 1)
    damaged = b"".join(lines)
    path.write_bytes(damaged)
    with pytest.raises(BadInput, match="is damaged: 1 of its lines cannot be read, 7 can"):
        read_metrics(tmp_path)
    folder.truncate_metrics(7)
    folder.append(record(7))  # the round is run again, and its line goes into the new file
    folder.close()
    assert [one["round"] for one in read_metrics(tmp_path)] == [0, 1, 2, 4, 5, 6, 7]
    (kept,) = tmp_path.glob("metrics.damaged-*.jsonl")
    assert kept.read_bytes() == damaged
    assert said == [
        f"1 line of metrics.jsonl cannot be read: the file as it was is kept as {kept.name}",
        "metrics.jsonl holds only 6 of 7 rounds: the lines of the others are lost",
    ]


def test_a_lost_line_break_costs_the_two_lines_it_parted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, resume=False, say=lambda text: None)
    for round in range(5):
        folder.append(record(round))
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\n", b"*", 2).replace(b"*", b"\n", 1)[:-1])  # the second one, and the last
    folder.truncate_metrics(5)
    folder.close()
    assert [one["round"] for one in read_metrics(tmp_path)] == [0, 3, 4]


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


@pytest.mark.parametrize("name", [".lock", "run.log", "metrics.jsonl"])
def test_a_link_in_a_run_folder_is_refused(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    RunFolder(tmp_path / "run", CONFIG, resume=False, say=silent).close()
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(precious)
    with pytest.raises(BadInput, match=f"{name} is a link"):
        RunFolder(tmp_path / "run", CONFIG, resume=True, say=silent)
    assert precious.read_bytes() == b"mine"


def test_a_run_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path / "run", CONFIG, resume=False, say=silent).close()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    with pytest.raises(BadInput, match="belongs to another user"):
        RunFolder(tmp_path / "run", CONFIG, resume=True, say=silent)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_killed_process_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "config.json.0123abcd.tmp").touch()
    (tmp_path / ".lock").touch()
    RunFolder(tmp_path, CONFIG, resume=False, say=silent).close()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_changed_config_is_noticed(tmp_path: Path) -> None:
    RunFolder(tmp_path, CONFIG, resume=False, say=silent).close()
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for change in ({"settings": {**config["settings"], "rounds": 5}}, {"request": {"model": "os:abort"}}):
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(BadInput, match="config.json was changed after the run began"):
            RunFolder(tmp_path, CONFIG, resume=True, say=silent)
    del config["run"]  # as an older version wrote it
    file.write_text(json.dumps(config))
    RunFolder(tmp_path, CONFIG, resume=True, say=silent).close()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"settings": 5}', '{"versions": []}', '{"machine": 1}'])
def test_a_config_made_by_hand_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput):
        RunFolder(tmp_path, CONFIG, resume=True, say=lambda text: None)


def test_a_changed_plan_is_noticed_and_a_lost_one_written_anew(tmp_path: Path) -> None:
    plan = {"steps": [{"k": 1}, {"k": 2}], "budget_bytes": 5}
    folder = RunFolder(tmp_path, CONFIG, resume=False, say=silent)
    folder.write_or_compare("plan.json", plan)
    folder.write_or_compare("plan.json", {**plan, "said_by_later_versions": 1})
    for changed in ({**plan, "budget_bytes": 6}, {**plan, "steps": []}, {**plan, "more": 1}, []):
        (tmp_path / "plan.json").write_text(json.dumps(changed))
        with pytest.raises(BadInput, match="plan.json was changed after|is not as Strata writes it"):
            folder.write_or_compare("plan.json", plan)
    (tmp_path / "plan.json").unlink()
    folder.write_or_compare("plan.json", plan)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    folder.close()
