"""`strata experiment` itself: real runs on digits, resumed after a kill; dry runs; bad input."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import time
from pathlib import Path

import pytest

from strata.cli import main
from strata.experiments import Asked, experiment
from strata.experiments.estimates import Estimator, stages_of
from strata.experiments.progress import Overview
from strata.experiments.setups import SETUPS
from strata.runs.launch import launch, make_method
from tests.federation.tiny import bits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the processes that carry out runs
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def strata(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def alive(folder: Path) -> bool:
    """Whether a process still holds the lock of this run."""
    with open(folder / ".lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True


def test_an_experiment_on_digits_from_beginning_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment", "table-digits", "--scale", "0.01", "--seeds", "1", "--only", "/0.125/slt,/0.125/small",
                 "--out", "out", "--jobs", "2", "--workers", "0", "--no-calibration"]  # fmt: skip
    cells = Path("out/runs/digits/resnet20/iid/0.125")
    blocked = cells / "small/rounds-1/seed-0"
    blocked.mkdir(parents=True)
    (blocked / "something.txt").write_text("not a run")
    code, out, err = strata(capsys, *arguments)
    # one run fails, the other does not mind
    assert code == 1 and "small/rounds-1/seed-0 failed" in err and "is not empty and holds no run" in err
    assert "2 runs, " in err and "2/2 runs, 100% of the work" in err
    summary = json.loads((cells / "slt/rounds-1/seed-0/summary.json").read_text())
    assert summary["bn"] == "batch" and f"| SLT | {100 * summary['accuracy']:.1f} | – |" in out
    assert "| small model | – | – |" in out and "written: out/table-digits/table.tex" in out
    (blocked / "something.txt").unlink()
    code, out, err = strata(capsys, *arguments)
    assert code == 0 and "1/1 runs, 1 finished before" in err and "| small model | – | – |" not in out
    # again: nothing is left to do, also where weights were left out; --render gives the same table, --json its files
    (cells / "slt/rounds-1/seed-0/model.safetensors").unlink()
    before = {path: path.stat().st_mtime_ns for path in Path("out/runs").rglob("*") if path.is_file()}
    code, again, err = strata(capsys, *arguments)
    assert code == 0 and again == out and err == ""
    code, rendered, _ = strata(capsys, "experiment", "table-digits", "--render", "--out", "out", "--json")
    assert code == 0 and json.loads(rendered)["files"][0] == "out/table-digits/table.md"
    assert before == {path: path.stat().st_mtime_ns for path in Path("out/runs").rglob("*") if path.is_file()}
    code, rendered, _ = strata(capsys, "experiment", "table-digits", "--render", "--out", "out", "--only", "small")
    assert code == 0 and "| SLT | – | – |" in rendered and "| small model | – | – |" not in rendered
    # other settings in the same place are refused
    config = cells / "slt/rounds-1/seed-0/config.json"
    changed = json.loads(config.read_text())
    changed["request"]["lr"] = 0.5
    config.write_text(json.dumps(changed))
    code, _, err = strata(capsys, *arguments)
    assert code == 2 and "lr was 0.5 and is now 0.1" in err


def stopped_at(folder: Path, rounds: int, kill: signal.Signals, arguments: list[str]) -> int:
    """The exit code of the command, which gets this signal once so many rounds are recorded."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = main(arguments)
        finally:
            os._exit(code)
    while lines(folder / "metrics.jsonl") < rounds:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(child, kill)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while alive(folder):  # the run's own process notices that its parent is gone, saves and ends
        time.sleep(0.05)
    return code


def test_killed_stopped_and_resumed_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment", "table-digits", "--scale", "0.06", "--seeds", "1", "--only", "/0.125/small",
                 "--out", "out", "--workers", "0", "--no-calibration"]  # fmt: skip
    run = next(run for run in experiment("table-digits", Asked(0.06, 1)).runs if run.request.method == "small")
    folder = Path("out/runs") / run.name
    assert stopped_at(folder, 1, signal.SIGKILL, arguments) == -signal.SIGKILL
    assert 1 <= lines(folder / "metrics.jsonl") < 6 and not (folder / "summary.json").exists()
    assert stopped_at(folder, 3, signal.SIGTERM, arguments) == 130
    assert 3 <= lines(folder / "metrics.jsonl") < 6 and not (folder / "summary.json").exists()
    code, _, err = strata(capsys, *arguments)
    assert code == 0 and "6 rounds from round" in err, err
    launch(run.request.changed(workers=0, checkpoint_every=6), Path("whole"), progress=False)
    assert bits(folder) == bits(Path("whole"))


def test_dry_run_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = strata(
        capsys, "experiment", "table-iid", "--scale", "0.06", "--only", "cifar10/*/0.25/", "--dry-run", "--data-dir",
        "nowhere", "--no-calibration",
    )  # fmt: skip
    assert code == 0 and not Path("runs").exists()
    shown = out.splitlines()
    assert len(shown) == 1 + 3 * 4 + 1
    assert shown[1].startswith("cifar10/resnet20/iid/0.25/slt/rounds-150/seed-0  devices 10/100  bn batch  ")
    assert shown[1].endswith(" TFLOP") and shown[-1].startswith("12 runs, ")


def test_dry_run_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = strata(
        capsys, "experiment", "table-digits", "--seeds", "2", "--only", "/0.125/small", "--dry-run", "--json"
    )
    answer = json.loads(out)
    assert code == 0 and [run["name"][-6:] for run in answer["runs"]] == ["seed-0", "seed-1"]
    first, second = answer["runs"]
    assert answer["cores"] >= 1
    assert first["core_seconds"] > 0 and first["core_seconds"] == second["core_seconds"]
    assert first["request"]["rounds"] == 100 and first["request"]["bn"] == "batch"


def test_estimated_flops_by_hand() -> None:
    runs = {run.cell.name: run for run in experiment("table-iid", Asked(0.2, 1)).runs}
    estimator = Estimator(calibrate=False)
    full = estimator.of(runs["cifar10/resnet20/iid/1/fedavg"])
    # golden.yaml: ResNet20's training FLOPs per sample; 500 rounds of 10 devices with 500 samples each; and the test
    # data 100 times: every convolution but the first has three products in training, one forward
    per_sample = full.train_flops / (500 * 10 * 500)
    forward = full.forward_flops / (100 * 10_000)
    first_layer = 2 * 9 * 3 * 16 * 32 * 32  # its input needs no gradient
    assert per_sample == pytest.approx(3 * forward - first_layer) and full.seconds is None
    slt = runs["cifar10/resnet20/iid/0.125/slt"]
    graph = estimator._network(slt.request, SETUPS["cifar10"]).graph
    stages = stages_of(make_method(slt.request, graph), slt.request)
    assert sum(stage.rounds for stage in stages) == 500
    assert estimator.of(slt).train_flops < full.train_flops


def test_list_and_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = strata(capsys, "experiment", "list")
    assert code == 0 and "table-iid" in out and " 144 runs" in out and len(out.splitlines()) == 16
    monkeypatch.setenv("STRATA_DATA", "no-data")
    for arguments, says in (
        (["table-x"], "no experiment 'table-x'"),
        (["table-iid", "--scale", "2"], "the scale must be above 0 and at most 1"),
        (["table-iid", "--seeds", "0"], "--seeds must be a whole number of at least 1"),
        (["table-iid", "--jobs", "none"], "--jobs must be a whole number"),
        (["table-iid", "--workers", "-1"], "workers are 0"),
        (["table-iid", "--only", "mnist9"], "no run fits --only mnist9"),
        (["table-iid", "--dry-run", "--render"], "either --dry-run or --render"),
        (["table-iid", "--only", "cifar10/"], "cifar10 is not in no-data: see `strata data`"),
        (["table-iid", "--data-dir", "nowhere"], "cifar10, femnist, cifar100, tinyimagenet are not in nowhere"),
        (["table-iid", "--weight-decay", "x"], "--weight-decay must be"),
        (["figure-mapping", "--schedule", "equal"], "leave out --schedule"),
        (["table-steps", "--out", "/proc/strata"], "cannot write to"),
    ):
        code, out, err = strata(capsys, "experiment", *arguments)
        assert code == 2 and says in err and err.count("\n") == 1 and out == "", (arguments, err)
        assert not Path("runs").exists()


def test_time_left_is_judged_by_the_work_done(tmp_path: Path) -> None:
    first, second = (run for run in experiment("table-digits", Asked(0.1, 1)).runs[:2])  # 10 rounds each
    text = io.StringIO()
    view = Overview({first.name: 30.0, second.name: 10.0}, skipped=3, file=text)
    (tmp_path / "a").mkdir()
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text("{}\n" * 2)  # resumed after 2 of 10 rounds: 6 of 30
    view.begin(first, tmp_path / "a")
    assert view.left() is None and view.share() == pytest.approx(6 / 40)
    metrics.write_text("{}\n" * 6)
    view._began = time.monotonic() - 60
    # 12 of work in 60 seconds; 40 - 6 - 12 = 22 are left: 110 seconds
    assert view.share() == pytest.approx(18 / 40) and view.left() == pytest.approx(110, rel=0.01)
    view.end(first, None)
    assert view.left() == pytest.approx(60 * 10 / 24, rel=0.01)
    view.begin(second, tmp_path / "b")
    view.end(second, "a reason")
    assert "10 rounds from round 3" in text.getvalue() and "failed: a reason" in text.getvalue()
    assert view.summary() == "2/2 runs, 3 finished before, 100% of the work, 0:00 left"
