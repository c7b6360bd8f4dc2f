"""Which folders are runs, which runs belong together, and what is made of damaged or unfinished ones."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.core.files import Lock
from strata.report.page_data import page_data
from strata.results.groups import group_runs
from strata.results.reading import find_runs, read_run
from tests.report.made import PLAN, append, make_run


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no folder"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text('{"name": "some other program"}')
    with pytest.raises(BadInput, match="is not a run and holds none down to 8 levels below it"):
        find_runs([tmp_path])
    with pytest.raises(BadInput, match="File name too long"):
        find_runs([tmp_path / ("x" * 300)])


def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BadInput, match=f"cannot read {tmp_path}: Permission denied"):
        find_runs([tmp_path])


def test_runs_are_found_below_a_folder_and_counted_once(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / "cmp" / "small" / f"seed-{seed}", seed=seed)
    make_run(tmp_path / "cmp" / "slt" / "seed-0", method="slt", plan=PLAN)
    runs = find_runs([tmp_path / "cmp", tmp_path / "cmp" / "small" / "seed-1"])
    assert sorted(run.name for run in runs) == ["slt/seed-0", "small/seed-0", "small/seed-1"]
    assert [run.name for run in find_runs([tmp_path])] == ["slt/seed-0", "small/seed-0", "small/seed-1"]


def test_runs_of_an_experiment_are_found_below_its_out(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "cifar10" / "resnet20" / "iid" / "0.125" / "small" / "rounds-500" / "seed-0")
    assert len(find_runs([tmp_path])) == len(find_runs([tmp_path / "runs"])) == 1


def test_seeds_of_one_method_are_mean_and_standard_deviation(tmp_path: Path) -> None:
    for seed in (0, 2):
        make_run(tmp_path / f"{seed}", seed=seed)
    (group,) = group_runs(find_runs([tmp_path]))
    curve = group.curve()
    assert curve.rounds == (1, 2, 3, 4) and curve.runs == 2
    assert curve.mean == pytest.approx((0.11, 0.21, 0.31, 0.41))  # of r/10 and r/10 + 0.02
    assert curve.std == pytest.approx([0.02 / math.sqrt(2)] * 4)  # sample deviation of two values 0.02 apart
    assert curve.costs["upload_bytes"] == (1000, 2000, 3000, 4000) and curve.costs["seconds"] == (2, 4, 6, 8)
    assert group.standing().costs["download_bytes"] == 8000
    assert group.per_class() == [pytest.approx(0.6), None, 1.0]  # mean of 0.5 and 0.7; null stays unknown


def test_other_settings_are_other_groups_named_by_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", constraints=(0.25,))
    make_run(tmp_path / "b", constraints=(0.5,))
    make_run(tmp_path / "c", constraints=(0.5,), partition="dirichlet:0.1")
    labels = [group.label for group in group_runs(find_runs([tmp_path]))]
    assert labels == ["small · iid · 0.25", "small · iid · 0.5", "small · dirichlet:0.1"]


def test_the_same_run_copied_is_not_a_second_sample(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    groups = group_runs(find_runs([tmp_path]))
    assert [len(group.runs) for group in groups] == [1, 1]
    assert [group.label for group in groups] == ["small (a)", "small (b)"]


def test_seeds_of_different_length_meet_where_all_have_been(tmp_path: Path) -> None:
    make_run(tmp_path / "0", seed=0)
    make_run(tmp_path / "1", seed=1, done=2)
    make_run(tmp_path / "2", seed=2, done=0)  # has not been evaluated at all
    (group,) = group_runs(find_runs([tmp_path]))
    assert group.curve().rounds == (1, 2) and group.curve().runs == 2
    assert (group.status, group.done, group.rounds) == ("unfinished", 0, 4)


def test_seeds_at_different_rounds_are_not_averaged(tmp_path: Path) -> None:
    done = {"a": (4, 2), "b": (4, 4, 2), "c": (3, 2), "d": (3, 2, 0), "e": (2, 2)}  # of 4 rounds, by seed
    for method, rounds in done.items():
        for seed, count in enumerate(rounds):
            make_run(tmp_path / method / str(seed), method=method, seed=seed, done=count)
    found = {group.method: group.standing() for group in group_runs(find_runs([tmp_path]))}
    # round r has r/10 + seed/100 and 1000 bytes up
    assert {name: (one.basis, one.seeds, one.round) for name, one in found.items()} == {
        "a": ("finished runs", (0,), 4), "b": ("finished runs", (0, 1), 4), "c": ("last common round", (0, 1), 2),
        "d": ("last common round", (0, 1), 2), "e": ("all runs", (0, 1), 2),
    }  # fmt: skip
    assert [one.accuracy for one in found.values()] == pytest.approx([0.4, 0.405, 0.205, 0.205, 0.205])
    assert [one.best for one in found.values()] == pytest.approx([0.4, 0.405, 0.205, 0.205, 0.205])
    assert found["a"].std is None and found["b"].std == pytest.approx(0.01 / math.sqrt(2))
    assert [one.costs["upload_bytes"] for one in found.values()] == [4000, 4000, 2000, 2000, 2000]


def test_nan_null_and_bad_lines_do_not_reach_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done=0, finished=False)
    append(run, 0, float("nan"))
    append(run, 1, None)
    append(run, 2, 0.5)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('not json\n[1, 2]\n{"round": 3, "accuracy": 0.9')  # the last line is being written
    read = read_run(run)
    assert [record["round"] for record in read.records] == [0, 1, 2]
    assert read.problems == ("2 lines of metrics.jsonl could not be read and left out",)
    made = page_data([read], None)
    json.dumps(made, allow_nan=False)
    assert made["groups"][0]["runs"][0]["accuracy"] == [None, None, 0.5]
    assert made["groups"][0]["curve"]["rounds"] == [3]


@pytest.mark.parametrize("text", ["[]", "{", '{"accuracy": "high", "per_class_accuracy": "none"}'])
def test_a_damaged_summary_is_survived(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "a")
    (run / "summary.json").write_text(text)
    (run / "plan.json").write_text('{"steps": [null, 3], "levels": [7]}')
    made = page_data([read_run(run)], None)
    assert made["groups"][0]["accuracy"] == 0.4  # the newest record's
    assert made["groups"][0]["per_class"] == []


def test_a_wrong_round_costs_its_own_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rounds=5)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round": 1', '"round": 9'))
    read = read_run(run)
    assert [one["round"] for one in read.records] == [0, 2, 3, 4]
    assert read.problems == ("1 line of metrics.jsonl could not be read and left out",)


def test_running_is_read_from_the_lock_without_taking_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done=2)
    assert read_run(run).status == "unfinished"
    lock = Lock(run)
    try:
        assert read_run(run).status == "running"
    finally:
        lock.release()
    assert read_run(run).status == "unfinished"


def test_memory_keeps_accounted_and_measured_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", method="slt", plan=PLAN)
    memory = page_data([read_run(run)], None)["groups"][0]["memory"]
    assert memory["accounting"] == "paper" and memory["budgets"] == [4 << 20]
    assert [step["memory_bytes"] for step in memory["steps"]] == [1 << 20, 2 << 20, 3 << 20]
    assert [step["measured"] for step in memory["steps"]] == [3 << 20, 3 << 20, None]  # step 2 had no round


def test_failures_are_counted_by_reason_and_device(tmp_path: Path) -> None:
    lost = {"id": 4, "reason": "dropped out"}
    run = make_run(tmp_path / "a", dropped={0: [lost], 2: [lost, {"id": 1, "reason": "late"}]})
    failures = page_data([read_run(run)], None)["groups"][0]["failures"]
    assert (failures["asked"], failures["dropped"]) == (8, 3)
    assert failures["reasons"] == [{"reason": "dropped out", "times": 2}, {"reason": "late", "times": 1}]
    assert failures["worst"][0] == {"device": 4, "times": 2, "asked": 4}


def test_the_privacy_that_was_spent_is_shown(tmp_path: Path) -> None:
    for name, values in (("spent", (1.25, None, 2.5)), ("endless", (None, None, None))):
        folder = make_run(tmp_path / name, rounds=3, method=name)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = (json.dumps({**r, "epsilon": e}) for r, e in zip(records, values, strict=True))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    make_run(tmp_path / "plain", method="plain")
    groups = page_data(find_runs([tmp_path]), None)["groups"]
    assert {group["method"]: group["privacy"] for group in groups} == {
        "spent": "ε ≤ 2.5", "endless": "no finite ε", "plain": "",
    }  # fmt: skip
