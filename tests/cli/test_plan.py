from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli import main
from tests.golden import golden

NETS = """
from torch import nn

def make(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )

def fixed():
    return make(7)

def raises():
    raise RuntimeError("out of luck")
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "strata_cli_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "strata_cli_nets", raising=False)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_of_the_issue_gives_the_golden_plan() -> None:
    command = "plan --model resnet20 --classes 10 --input 3x32x32 --batch 32 --constraint 0.25 --rounds 2500 --json"
    done = subprocess.run(
        [sys.executable, "-m", "strata", *command.split()], capture_output=True, text=True, check=True
    )
    data = json.loads(done.stdout)
    row = golden()["configs"]["ResNet20@0.25"]
    assert data["budget_bytes"] == golden()["memory"]["ResNet20@0.25"]["A_all_leaf"]
    assert data["full_bytes"] == golden()["memory"]["ResNet20@1.0"]["A_all_leaf"]
    assert [step["scale"] for step in data["steps"][1:]] == row["s_exact"]
    assert data["steps"][-1]["until_round"] == 2500 and data["model"] == "resnet20" and data["schedule"] == "cumulative"


def test_table_for_people_with_a_model_never_seen(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "strata_cli_nets:make", "--input", "3x32x32", "--budget", "4.6MiB")
    assert code == 0
    assert "strata_cli_nets:make: 10 classes, input 3x32x32, batch 32" in out
    assert "peak accounting" in out and "A process that trains this holds" in out


def test_levels_by_comma_and_by_repetition(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", "strata_cli_nets:make", "--accounting", "paper", "--json")
    _, comma, _ = run(capsys, *common, "--constraint", "0.75,0.9,1")
    _, repeated, _ = run(capsys, *common, "--constraint", "0.75", "--constraint", "0.9", "--constraint", "1")
    assert comma == repeated
    assert [level["constraint"] for level in json.loads(comma)["levels"]] == [0.75, 0.9, 1.0]


def test_classes_reach_the_callable(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--constraint", "1", "--json")
    _, out, _ = run(capsys, "--model", "strata_cli_nets:make", "--classes", "33", *settings)
    assert json.loads(out)["classes"] == 33
    _, out, _ = run(capsys, "--model", "strata_cli_nets:fixed", *settings)
    assert json.loads(out)["classes"] == 7
    code, out, err = run(capsys, "--model", "strata_cli_nets:fixed", "--classes", "33", *settings)
    assert (code, out) == (2, "") and "--classes is 33, but strata_cli_nets:fixed has 7 outputs" in err


def test_picture(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "--model", "strata_cli_nets:make", "--constraint", "0.75", "--json", "--picture", "plan.svg"
    )
    assert code == 0 and json.loads(out)["feasible"] and "plan.svg" in err
    assert (nets / "plan.svg").read_text().startswith("<?xml")


def test_infeasible(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "strata_cli_nets:make", "--budget", "300KiB", "--json")
    data = json.loads(out)
    assert code == 3 and data["feasible"] is False and data["reason"] in err
    assert data["smallest_budget_bytes"] - 300 * 1024 >= data["short_bytes"] > 0
    code, out, err = run(capsys, "--model", "strata_cli_nets:make", "--budget", "300KiB")
    assert code == 3 and out == "" and "The smallest budget that fits is" in err
    assert "within 300.0 KiB: " in err and "`strata run --lean` finds these settings" in err
    fixed = ["--model", "strata_cli_nets:make", "--budget", "1MiB", "--norm-statistics", "fixed", "--method", "fd"]
    code, _, err = run(capsys, *fixed)
    assert code == 2 and "no batch norm" in err or "fixed statistics are those of one network" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--budget", "12 bananas"], "such as '24 MiB'"),
        (["--budget", "0"], "at least one byte"),
        (["--budget", "-5"], "at least one byte"),
        (["--budget", "-5 MiB"], "at least one byte"),
        (["--constraint", "0"], "above 0 and at most 1"),
        (["--constraint", "2"], "above 0 and at most 1"),
        (["--constraint", "0.5,"], "no empty places"),
        (["--constraint", "0.5", "--budget", "1MiB"], "either --constraint"),
        ([], "either --constraint"),
        (["--constraint", "0.5", "--rounds", "0"], "--rounds must be a whole number of at least 1"),
        (["--constraint", "0.5", "--rounds", "ten"], "--rounds must be a whole number of at least 1"),
        (["--constraint", "0.5", "--batch", "0"], "--batch must be"),
        (["--constraint", "0.5", "--classes", "0"], "--classes must be"),
        (["--constraint", "0.5", "--input", "3x32"], "3 channels"),
        (["--constraint", "0.5", "--input", "three"], "such as 3x32x32"),
        (["--constraint", "0.5", "--model", "resnet21"], "unknown model 'resnet21'"),
        (["--constraint", "0.5", "--model", "no_such_module:make"], "cannot import 'no_such_module'"),
        (["--constraint", "0.5", "--model", "strata_cli_nets:raises"], "raised RuntimeError: out of luck"),
        (["--constraint", "0.5", "--model", "strata_cli_nets:make", "--input", "4x32x32"], "4x32x32|channels"),
        (["--constraint", "0.5", "--picture", "plan.bmp"], "--picture is a .png"),
        (["--constraint", "0.5", "--head-fraction", "0"], "--head-fraction must be above 0"),
        (["--constraint", "0.5", "--patience", "5"], "--patience is for --schedule early-stopping"),
        (["--constraint", "0.5", "--schedule", "early-stopping", "--patience", "0"], "--patience must be"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    nets: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("strata plan: ") and err.count("\n") == 1
    import re

    assert re.search(message, err)


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("strata.cli.plan.run", stop)
    assert main(["plan", "--constraint", "0.5"]) == 130


def test_help_is_quick_and_has_an_example() -> None:
    code = "import sys; from strata.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    done = subprocess.run([sys.executable, "-m", "strata", "plan", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "strata plan --model resnet20" in done.stdout
