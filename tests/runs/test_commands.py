from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strata.cli import main
from strata.core.files import Lock
from strata.core.settings import digest_of
from strata.engines import Engine
from strata.methods import METHODS
from strata.runs import launch as launching
from strata.runs.config import RunConfig
from strata.runs.launch import launch
from tests.federation.tiny import bits

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5, stride=4, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        return self.classifier(x.mean((2, 3)))

def make(num_classes=10):
    return Net(num_classes)

def seven():
    return Net(7)
"""
SMALL = ["--model", "strata_run_nets:make", "--devices", "10", "--per-round", "3", "--rounds", "3", "--workers", "0",
         "--quiet"]  # fmt: skip


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "strata_run_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "strata_run_nets", raising=False)
    return tmp_path


def strata(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("method", ["slt", "small", "fd", "fedrolex", "heterofl", "fjord", "fedavg"])
def test_every_method_runs(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    budget = [] if method == "fedavg" else ["--constraint", "0.75"]
    code, out, err = strata(capsys, "run", *SMALL, "--method", method, *budget, "--out", "run", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["method"] == method and summary["rounds"] == 3 and 0 <= summary["accuracy"] <= 1


@pytest.mark.parametrize("method", ["slt", "small", "fd", "fedrolex", "heterofl", "fjord", "fedavg"])
def test_every_method_runs_on_different_devices_with_different_data(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = strata(
        capsys, "run", *SMALL, "--method", method, "--constraint", "0.75,1", "--partition", "dirichlet:0.1", "--out",
        "run", "--json", "--proximal", "0.01", "--server-optimizer", "momentum", "--server-lr", "0.5", "--weighted",
    )  # fmt: skip
    assert code == 0, err


def test_micro_batches_count_in_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", *SMALL, "--method", "slt", "--budget", "450KiB", "--batch", "32", "--json"]
    code, _, err = strata(capsys, *asked, "--out", "whole")
    assert code == 3, err
    code, out, err = strata(capsys, *asked, "--out", "run", "--micro-batch", "2")
    assert code == 0, err
    assert 0 < json.loads(out)["peak_bytes"] <= 1.001 * 450 * 1024


def test_the_closing_table_and_resuming_what_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = strata(capsys, "run", *SMALL, "--method", "fd", "--constraint", "0.75", "--out", "run")
    assert code == 0 and "accuracy" in out and "measured peak" in out and "re-estimated" in out
    before = bits(Path("run"))
    assert strata(capsys, "run", "--resume", "run", "--workers", "0")[0] == 0
    assert bits(Path("run")) == before


def test_worker_processes_find_a_model_in_the_current_folder_and_give_the_same_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", *SMALL, "--method", "slt", "--constraint", "0.75", "--seed", "3"]
    assert main([*arguments, "--out", "one"]) == 0
    Path("safetensors.py").write_text("raise RuntimeError('this folder is no place for packages')")
    done = subprocess.run(
        [sys.executable, "-m", "strata", *arguments, "--workers", "2", "--out", "two"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert bits(Path("one")) == bits(Path("two"))


def test_resume_runs_no_code_that_a_changed_config_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("strata_test_evil.py").write_text("open('ran', 'w')")
    Path("run").mkdir()
    request = {"model": "strata_test_evil:make", "method": "strata_test_evil:Method", "data": "digits"}
    config = {"format": 2, "settings": {}, "request": {"data": "digits"}, "versions": {}}
    for changed in ({**config, "run": digest_of(config), "request": request}, {**config, "request": {"rounds": [[]]}}):
        Path("run", "config.json").write_text(json.dumps(changed))
        code, _, err = strata(capsys, "run", "--resume", "run")
        assert code == 2 and ("config.json was changed" in err or "rounds" in err) and "Traceback" not in err
    config = {**config, "request": request}
    Path("run", "config.json").write_text(json.dumps({**config, "run": digest_of(config)}))
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    code, _, err = strata(capsys, "run", "--resume", "run")
    assert code == 2 and "belongs to another user" in err and not Path("ran").exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"accuracy": "high"}', "[" * 100_000])
def test_a_summary_made_by_hand_is_one_sentence(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("run").mkdir()
    config = {"format": 2, "settings": {}, "request": {"data": "digits", "method": "fedavg"}, "versions": {}}
    Path("run", "config.json").write_text(json.dumps(config))
    Path("run", "model.safetensors").touch()
    Path("run", "summary.json").write_text(text)
    code, _, err = strata(capsys, "run", "--resume", "run")
    assert code == 2 and "summary.json" in err and "Traceback" not in err


@pytest.mark.parametrize("flag", ["--rounds", "--lr", "--constraint", "--budget", "--dp-noise", "--out"])
def test_a_value_that_is_two_dashes_is_none(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    code, _, err = strata(capsys, "run", f"{flag}=--", "--out", "run")
    assert code == 2 and err == f"strata: {flag} needs a value, and -- is none\n" and not Path("run").exists()


@pytest.mark.parametrize(("noise", "clip"), [("1e308", "1"), ("1", "1e308"), ("1e5", "1")])
def test_noise_beyond_all_numbers_is_refused(capsys: pytest.CaptureFixture[str], noise: str, clip: str) -> None:
    private = ["--method", "fedavg", "--dp-noise", noise, "--dp-clip", clip, "--validation", "0.05"]
    code, _, err = strata(capsys, "run", *SMALL, *private, "--out", "run")
    assert code == 2 and "of differential privacy is" in err and not Path("run").exists()


def test_bad_input_is_one_sentence_exit_code_2_and_nothing_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert strata(capsys, "run", *SMALL, "--method", "fd", "--constraint", "0.75", "--out", "used")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("used").rglob("*") if path.name != ".lock"}
    fd = ["run", *SMALL, "--method", "fd", "--constraint", "0.75"]
    for name, text in (("list", "[]"), ("request", '{"request": []}')):
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    for arguments, says in (
        ([*fd, "--out", "used"], "already holds a run: resume it with --resume used"),
        (["run", "--resume", "used", "--rounds", "9", "--lr", "0.2"], "lr was 0.1 and is now 0.2; rounds was 3"),
        (["run", "--resume", "nothing"], "no run to resume in nothing"),
        ([*fd], "either --out DIR for a new run or --resume DIR"),
        ([*fd, "--out", "new", "--resume", "used"], "either --out DIR for a new run or --resume DIR"),
        ([*fd, "--out", "new", "--data", "cifar10", "--data-dir", "nowhere"], "run: strata data get cifar10"),
        ([*fd, "--out", "new", "--classes", "100"], "--classes is 100 and digits has 10 classes"),
        ([*fd, "--out", "new", "--input", "3x64x64"], "--input is 3x64x64 and the images of digits are 3x32x32"),
        ([*fd, "--out", "new", "--model", "strata_run_nets:seven"], "the model has 7 outputs and digits has 10"),
        ([*fd, "--out", "new", "--per-round", "11"], "11 devices per round cannot be chosen from 10"),
        ([*fd, "--out", "new", "--devices", "5000"], "would leave devices empty"),
        ([*fd, "--out", "new", "--method", "magic"], "no method 'magic'"),
        (["run", *SMALL, "--method", "fd", "--out", "new"], "fd needs to know what a device can hold"),
        ([*fd, "--out", "new", "--budget", "1MiB"], "either a constraint or a budget"),
        ([*fd, "--out", "/proc/strata/run"], "cannot write to"),
        ([*fd, "--out", "strata_run_nets.py"], "not a folder"),
        ([*fd, "--out", "new", "--init", "no.safetensors"], "no file no.safetensors"),
        ([*fd, "--out", "new", "--init", "strata_run_nets.py"], "does not hold weights"),
        ([*fd, "--out", "new", "--deadline", "-1"], "deadline"),
        ([*fd, "--out", "new", "--deadline", "inf"], "the deadline is a number"),
        ([*fd, "--out", "new", "--norm-bound", "inf"], "the norm bound must be a number above 0"),
        ([*fd, "--out", "new", "--devices", "0", "--dp-noise", "1", "--dp-clip", "1"], "at least 1 device, not 0"),
        ([*fd, "--out", "new", "--augmentation", "mixup"], "there is no augmentation 'mixup'"),
        ([*fd, "--out", "new", "--data-dir", "~no-such-user/data"], "begins with a home folder that is not known"),
        ([*fd, "--out", "new", "--task-timeout", "nan", "--workers", "1"], "a number of seconds above 0"),
        ([*fd, "--out", "new", "--task-timeout", "5"], "--workers 0 has none"),
        ([*fd, "--out", "new", "--validation", "nan"], "validation is the share of training data"),
        ([*fd, "--out", "new", "--validation", "inf"], "validation is the share of training data"),
        ([*fd, "--out", "new", "--validation", "0.1", "--seed", "-1"], "the seed is a whole number of at least 0"),
        ([*fd, "--out", "new", "--partition", "lazy:99999999999999999999"], "each device 1 to 268435456 samples"),
        ([*fd, "--out", "x" * 300], "(File name too long): choose a folder that can be written to"),
        (["run", "--resume", "x" * 300], "(File name too long)"),
        (["run", "--resume", "list"], "config.json is not as Strata writes it: it holds no JSON object"),
        (["run", "--resume", "request"], "request was started from Python"),
        (["compare", *SMALL, "--methods", "fd", "--constraint", "0.75", "--out", "x" * 300], "(File name too long)"),
        ([*fd, "--out", "new", "--mlflow"], "MLflow is not installed: pip install 'strata-fl[mlflow]'"),
    ):  # fmt: skip
        if "--mlflow" in arguments and __import__("importlib.util").util.find_spec("mlflow") is not None:
            continue
        code, out, err = strata(capsys, *arguments)
        assert code == 2 and says in err and err.count("\n") == 1 and out == "", (arguments, err)
        assert not Path("new").exists()
    assert before == {path: path.stat().st_mtime_ns for path in Path("used").rglob("*") if path.name != ".lock"}


SLOW = ("--stragglers", "0.2:3")


@pytest.mark.parametrize(
    "methods, options, says",
    [
        ("fd", ("--schedule", "equal"), "--schedule is for the method slt, not for fd"),
        ("small,fd", ("--schedule", "early-stopping", "--patience", "3"), "is for the method slt, not for small or fd"),
        ("fd", ("--patience", "3"), "--patience is for the method slt, not for fd"),
        ("fd", ("--head-fraction", "1"), "--head-fraction is for the method slt, not for fd"),
        (
            "small,fedavg",
            ("--variant", "shared"),
            "--variant is for the method fd or fedrolex or heterofl or fjord, not for",
        ),
        ("small", ("--pool", "3"), "--pool is for the method fd, not for small"),
        ("small,fd", ("--accounting", "peak"), "small or fd has none here: leave it out, or give a --budget"),
        ("slt", ("--patience", "3"), "--patience is for --schedule early-stopping"),
        ("slt,fd", ("--patience", "3", "--schedule", "equal"), "--patience is for --schedule early-stopping"),
        ("slt", ("--server-momentum", "0.5"), "--server-momentum is for --server-optimizer momentum or adam"),
        ("slt", ("--server-momentum", "0.5", "--server-optimizer", "none"), "is for --server-optimizer momentum or"),
        ("slt", SLOW, "--stragglers matter only where they can come too late: give a --deadline"),
    ],
)
def test_an_option_that_nothing_would_use_is_refused(
    methods: str, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (*SMALL, "--constraint", "0.75", *options, "--out", "new")
    commands = [("compare", "--methods", methods)] + ([] if "," in methods else [("run", "--method", methods)])
    for command in commands:
        code, out, err = strata(capsys, *command, *asked)
        assert code == 2 and says in err and err.count("\n") == 1 and out == "" and not Path("new").exists()


def test_what_a_folder_was_started_with_is_not_given_anew(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.of(
        model="strata_run_nets:make", devices=10, per_round=3, rounds=2, method="fd", constraints=(0.75,),
        schedule="equal", patience=3, accounting="peak", server_momentum=0.5,
        workers=0,
    )  # fmt: skip
    launch(config, Path("old"), progress=False)
    before = bits(Path("old"))
    for name in ("summary.json", "model.safetensors"):  # as if it had been killed at its end
        Path("old", name).unlink()
    code, _, err = strata(capsys, "run", "--resume", "old", "--workers", "0", "--quiet", "--schedule", "equal")
    assert code == 0 and bits(Path("old")) == before, err


def test_an_impossible_budget_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = strata(capsys, "run", *SMALL, "--method", "slt", "--budget", "1KiB", "--out", "new")
    assert code == 3 and "no plan fits" in err and not Path("new").exists()


def test_a_quorum_that_is_never_met_is_exit_code_1_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = strata(
        capsys, "run", *SMALL, "--method", "fd", "--constraint", "0.75", "--out", "run", "--dropout", "0.95",
        "--quorum", "3",
    )  # fmt: skip
    assert code == 1 and "dropped out" in err and "rounds are saved in run" in err


def test_weights_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["run", *SMALL, "--method", "small", "--constraint", "1"]
    assert strata(capsys, *base, "--out", "first")[0] == 0
    code, out, _ = strata(
        capsys, *base, "--out", "second", "--init", "first/model.safetensors", "--lr", "1e-6", "--lr-end", "1e-6",
        "--json",
    )  # fmt: skip
    first, second = json.loads(Path("first/summary.json").read_text()), json.loads(out)
    assert code == 0 and second["accuracy"] == pytest.approx(first["accuracy"], abs=0.05)


def test_compare_trains_tells_draws_and_finishes_what_is_unfinished(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--methods", "slt,small", *SMALL, "--constraint", "0.75", "--seeds", "2", "--out", "cmp"]
    code, out, err = strata(capsys, *arguments)
    assert code == 0 and "±" in out and "slt" in out and "small" in out, err
    assert Path("cmp/accuracy.png").stat().st_size > 5000 and Path("cmp/accuracy.svg").read_text().startswith("<?xml")
    rows = json.loads(Path("cmp/summary.json").read_text())
    accuracies = [json.loads(Path(f"cmp/slt/seed-{n}/summary.json").read_text())["accuracy"] for n in (0, 1)]
    assert rows[0]["accuracies"] == accuracies and rows[0]["accuracy_mean"] == pytest.approx(sum(accuracies) / 2)
    assert rows[0]["accuracy_std"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    finished = bits(Path("cmp/slt/seed-0"))
    for name in ("summary.json", "model.safetensors"):  # as if it had been killed at its end
        Path(f"cmp/small/seed-1/{name}").unlink()
    code, again, _ = strata(capsys, *arguments)
    assert code == 0 and bits(Path("cmp/slt/seed-0")) == finished
    assert json.loads(Path("cmp/summary.json").read_text()) == rows
    code, _, err = strata(capsys, *arguments, "--lr", "0.05")
    assert code == 2 and "lr was 0.1 and is now 0.05" in err
    code, _, err = strata(capsys, "compare", "--methods", "slt,slt", *SMALL, "--constraint", "0.75", "--out", "x")
    assert code == 2 and "once each" in err
    code, _, err = strata(capsys, "compare", "--methods", "slt,magic", *SMALL, "--constraint", "0.75", "--out", "x")
    assert code == 2 and "no method 'magic'" in err and not Path("x").exists()


def test_compare_in_another_order_and_with_more_methods(capsys: pytest.CaptureFixture[str]) -> None:
    common = [*SMALL, "--constraint", "0.75", "--out", "cmp"]
    assert strata(capsys, "compare", "--methods", "slt,small", *common, "--schedule", "equal")[0] == 0
    finished = bits(Path("cmp/slt/seed-0"))
    pool = ["--variant", "pool", "--pool", "2"]
    code, out, err = strata(
        capsys, "compare", "--methods", "fd,small,slt", *common, "--schedule", "equal", *pool, "--json"
    )
    assert code == 0 and [row["method"] for row in json.loads(out)] == ["fd", "small", "slt"], err
    assert bits(Path("cmp/slt/seed-0")) == finished
    before = Path("cmp/compare.json").read_bytes()
    code, _, err = strata(
        capsys, "compare", "--methods", "slt,fd", *common, "--schedule", "equal", "--variant", "shared"
    )
    assert code == 2 and 'variant was "pool" and is now "shared"' in err and err.count("\n") == 1
    lock = Lock(Path("cmp"))
    code, _, err = strata(capsys, "compare", "--methods", "slt", *common, "--schedule", "equal")
    lock.release()
    assert code == 2 and "in use by another run" in err
    assert Path("cmp/compare.json").read_bytes() == before


def test_compare_of_a_method_without_a_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "mine", METHODS["small"])  # as a user would register it
    code, out, err = strata(
        capsys, "compare", "--methods", "mine,slt", *SMALL, "--constraint", "0.75", "--out", "cmp", "--json"
    )
    assert code == 0 and [row["method"] for row in json.loads(out)] == ["mine", "slt"], err
    assert "mine (" in Path("cmp/accuracy.svg").read_text()


def test_compare_leaves_nothing_of_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["compare", "--methods", "small", *SMALL, "--constraint", "0.75", "--out", "new"]
    for options, says in (
        (["--deadline", "inf"], "the deadline is a number"),
        (["--per-round", "11"], "11 devices per round cannot be chosen from 10"),
        (["--checkpoint-every", "0"], "every 1 or more rounds"),
    ):
        code, _, err = strata(capsys, *common, *options)
        assert code == 2 and says in err and err.count("\n") == 1 and not Path("new").exists()


@pytest.mark.parametrize("validation", ([], ["--validation", "0.1"]))
def test_compare_gives_up_tasks_that_take_too_long(
    validation: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine, limits = launching.make_engine, []

    def seen(*arguments: Any, timeout: float | None = None, **more: Any) -> Engine:
        limits.append(timeout)
        return make_engine(*arguments[:3], 0, **more)  # in this process: quicker

    monkeypatch.setattr(launching, "make_engine", seen)
    asked = ["compare", "--methods", "small,fd", *SMALL, "--constraint", "0.75", "--workers", "1", "--out", "cmp"]
    code, _, err = strata(capsys, *asked, "--task-timeout", "300", *validation)
    assert code == 0 and limits == [300.0], err  # one engine for both methods, also with a split of the same seed


def test_ctrl_c_with_workers_saves_says_how_to_go_on_and_shows_no_traceback() -> None:
    arguments = ["run", *SMALL[:-1], "--method", "fd", "--constraint", "0.75", "--rounds", "200", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "strata", *arguments, "--out", "run"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    text = ""
    while "round 2/200" not in text:
        line = process.stderr.readline()
        assert line, text
        text += line
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text += process.stderr.read()
    assert process.wait() == 130
    assert "continue with: strata run --resume run" in text and "Traceback" not in text
    process.stderr.close()


def test_a_run_that_stopped_before_its_first_checkpoint_still_begins_with_its_init(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [*SMALL, "--method", "fedavg"]
    assert strata(capsys, "run", *small, "--out", "first")[0] == 0
    with_init = ["run", *small, "--seed", "5", "--init", "first/model.safetensors"]
    assert strata(capsys, *with_init, "--out", "whole")[0] == 0
    assert strata(capsys, *with_init, "--out", "cut")[0] == 0
    for name in ("checkpoint", "summary.json", "model.safetensors"):
        path = Path("cut") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert strata(capsys, "run", "--resume", "cut", "--workers", "0")[0] == 0
    assert bits(Path("cut")) == bits(Path("whole"))
