"""A method of the user's own, by where it is: `--method package.module:Class`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.cli import main
from strata.core.errors import BadInput, Infeasible
from strata.core.files import read_json
from strata.execution import Execution, memory
from strata.methods import Levels, Method, method_class
from strata.methods.choice import check_levels, method_named
from tests.methods.tiny import tiny_graph

STEP = Execution(batch_size=16)
OWN = """
from dataclasses import dataclass

import torch
from torch import nn

from strata.core.seeds import generator
from strata.methods import Card, Levels, Method


@dataclass(frozen=True)
class RandomDepth(Method):
    card = Card("random-depth")
    seed: int = 0

    def cut_for(self, round, device):
        draw = generator(self.seed, "random depth", round, device)
        return self.graph.freeze(self.graph.full(), int(torch.randint(self.graph.depth, (), generator=draw)))


@dataclass(frozen=True)
class Last(Levels):
    def cut_for(self, round, device):
        return self.graph.rolling(self.scale(device), -1)


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
                         nn.Flatten(), nn.Linear(72, 10))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    return tmp_path


COMMON = ["run", "--model", "own_methods:net", "--devices", "20", "--per-round", "2", "--seed", "3", "--quiet"]


def lines(folder: Path) -> list[dict[str, object]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_run_stop_and_resume_on_the_command_line(here: Path) -> None:
    """Stopped by Ctrl-C after the first rounds; a new process finds the class again by the folder's own request."""
    asked = [*COMMON, "--method", "own_methods:RandomDepth", "--rounds", "40", "--workers", "1"]
    assert main([*asked[:-1], "0", "--out", "b"]) == 0  # first, so that the other process need not export the network
    stopped = subprocess.Popen([sys.executable, "-m", "strata", *asked, "--out", "a"], cwd=here)
    metrics = here / "a" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert stopped.poll() is None
        time.sleep(0.02)  # the run needs the processor more
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(timeout=60) == 130
    assert 2 <= len(lines(here / "a")) < 40
    assert read_json(here / "a" / "config.json")["request"]["method"] == "own_methods:RandomDepth"
    assert main(["run", "--resume", "a", "--quiet", "--workers", "0"]) == 0
    assert lines(here / "a") == lines(here / "b") and len(lines(here / "b")) == 40
    first, second = (read_json(here / name / "summary.json") for name in "ab")
    assert first["method"] == "random-depth" and first["model_sha256"] == second["model_sha256"]
    assert main(["run", "--resume", "a", "--method", "fedavg", "--quiet"]) == 2, "another method is refused"


def test_levels_need_a_budget_and_get_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*COMMON, "--method", "own_methods:Last", "--rounds", "1", "--workers", "0"]
    assert main([*asked, "--out", "a"]) == 2
    assert "Last needs to know what a device can hold" in capsys.readouterr().err
    assert main([*asked, "--out", "a", "--constraint", "0.5,0.25"]) == 0
    assert read_json(here / "a" / "config.json")["settings"]["method"] == {"name": "Last", "constraints": [0.5, 0.25]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "there is no method 'nothing': choose one of slt, fedavg"),
        ("own_methods:Missing", "module 'own_methods' has no 'Missing' to train by"),
        ("no_such_module:Method", "cannot import 'no_such_module' for the method"),
        ("own_methods:net", "'own_methods:net' is not a method: a subclass of strata.methods.Method"),
        (":Method", "a method is named package.module:Class, such as"),
    ],
)
def test_names_that_lead_nowhere(here: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--method", name, "--rounds", "1", "--out", "a"]) == 2
    assert said in capsys.readouterr().err and not (here / "a").exists()


def test_a_method_without_levels_must_fit_every_device() -> None:
    """What it needs by default is the whole model, in the accounting that was asked for."""
    graph = tiny_graph()

    class Whole(Method):
        def cut_for(self, round, device):
            return self.graph.full()

    need = memory(graph, graph.full(), STEP).total
    for budgets in ((), (need,), (2 * need, need)):
        assert isinstance(method_named(Whole, graph, budgets=budgets, execution=STEP), Whole)
    with pytest.raises(Infeasible, match=rf"\({need:,} bytes\) on every device, 1 B more than the budget of"):
        method_named(Whole, graph, budgets=(need - 1, need), execution=STEP)
    assert isinstance(method_named(Whole, graph, constraints=(1.0,), execution=STEP), Whole)
    with pytest.raises(Infeasible):
        method_named(Whole, graph, constraints=(0.5,), execution=STEP)
    with pytest.raises(BadInput, match="Whole has no option pool: it has none"):
        method_named(Whole, graph, pool=3)


def test_a_class_stands_in_for_its_name() -> None:
    graph = tiny_graph()

    class Wide(Levels):
        def cut_for(self, round, device):
            return self.graph.prefix(self.scale(device))

    made = method_named(Wide, graph, constraints=(0.5,))
    assert made == Wide(graph, (0.5,)) and made.name == "Wide"
    with pytest.raises(BadInput, match="needs to know"):
        check_levels(Wide, (), ())
    assert method_class("fd").card.options.keys() == {"seed", "variant", "pool"}
