"""`strata fit` as a command: exit codes, the line to paste, the pilot, the picture."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from strata.cli import build_parser, main
from strata.cli.run import asked_of
from strata.core.files import read_json
from strata.runs.config import RunConfig

NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2),
                         nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
"""
SPEED = ["--gflops", "2", "--mbit", "5"]  # no calibration


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fit_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_json_and_a_command_that_is_the_same_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "fit_net:net", "--budget", "300KiB", "--batch", "16", "--rounds", "7", "--max-upload", "1MB"]
    assert main(["fit", *asked, *SPEED, "--json", "--picture", "fit.png"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (here / "fit.png").stat().st_size > 1000
    assert answer["rounds"] == 7 and answer["batch"] == 16 and answer["budget_bytes"] == 300 * 1024
    for way in answer["ways"]:
        if not way["fits"]:
            continue
        words = shlex.split(way["command"])
        assert words[:2] == ["strata", "run"]
        config = RunConfig.of(**asked_of(build_parser().parse_args(words[1:])))
        assert config == RunConfig.of(
            model="fit_net:net", budgets=(300 * 1024,), batch=16, rounds=7, max_upload=10**6, lean=True,
            method=way["method"],
        )  # fmt: skip


def test_what_is_recommended_warms_up(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run of the line to paste and that of --method auto are the same; what is asked for stays as it is."""
    asked = ["--model", "fit_net:net", "--budget", "300KiB", "--batch", "16"]
    for given, warmup in (([], 5), (["--rounds", "34"], 3), (["--warmup", "0"], 0), (["--warmup", "7"], 7)):
        assert main(["fit", *asked, *given, *SPEED, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        words = shlex.split(answer["ways"][answer["recommended"]]["command"])
        config = RunConfig.of(**asked_of(build_parser().parse_args(words[1:])))
        auto = RunConfig.of(**asked_of(build_parser().parse_args(["run", "--method", "auto", *asked, *given])))
        assert config.course == auto.course and config.course.warmup == warmup
    assert RunConfig.of(method="small", budgets=(300 * 1024,), lean=True).course.warmup == 0


def test_a_pilot_says_how_accurate_each_way_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "fit_net:net", "--budget", "560KiB", "--devices", "100", "--per-round", "1", "--data", "digits"]
    assert main(["fit", *asked, *SPEED, "--pilot", "1", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert all((way["accuracy"] is not None) == way["fits"] for way in ways)


def test_a_run_by_auto_is_recorded_and_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "fit_net:net", "--method", "auto", "--budget", "410KiB", "--devices", "100", "--per-round", "1"]
    assert main(["run", *asked, "--rounds", "1", "--workers", "0", "--out", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1
    config = read_json(here / "run" / "config.json")
    assert config["request"]["method"] == "auto"
    chosen = config["settings"]["method"]
    assert chosen["name"] in ("fedavg", "small") and chosen["executions"][0]["micro_batch"] in (4, 8)
    assert main(["run", "--resume", "run", "--method", "auto"]) == 0
    assert main(["run", *asked, "--lean", "--budget", "410KiB", "--constraint", "0.5", "--out", "other"]) == 2


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--budget", "100B"], 3, "nothing fits; the smallest budget that would do is"),
        ([], 2, "give what a device can hold"),
        (["--budget", "1MB", "--pilot", "2"], 2, "a pilot trains, so it needs data"),
        (["--budget", "1MB", "--max-flops", "1e-6"], 2, "whatever the memory"),
        (["--budget", "1MB", "--gflops", "2"], 2, "give --gflops, such as 2, and --mbit"),
        (["--budget", "1MB", "--picture", "a.txt"], 2, "--picture is a .png"),
        (["--budget", "1MB", "--picture", "nowhere/a.png"], 2, "and nowhere is not: make it first"),
        (["--budget", "1MB", "--data", "digits", "--samples", "5"], 2, "the data says"),
    ],
)
def test_exit_codes(here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, says: str) -> None:
    speed = [] if "--gflops" in flags else SPEED
    assert main(["fit", "--model", "fit_net:net", *speed, *flags]) == code
    said = capsys.readouterr().err.splitlines()[-1]
    assert says in said and "Traceback" not in said
