"""What a new user meets first: refusals at once, one line each, and defaults that follow what was asked."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strata
from strata.cli import build_parser
from strata.core.errors import BadInput
from strata.core.sizes import parse_bytes
from strata.graph import ChannelGraph
from strata.planning import plan
from strata.runs.config import RunConfig, RunOptions
from tests.federation import tiny
from tests.federation.tiny import tiny_run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_plan_refuses_at_once_what_a_run_refuses(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.TinyNet().to(dtype)
    with pytest.raises(BadInput, match="conv1.weight is .* and runs train in float32") as of_plan:
        plan(model, (3, 8, 8), budget="1MiB")
    with pytest.raises(BadInput) as of_run:
        strata.run(model, tiny.data(), "fedavg", out=tmp_path / "run")
    assert str(of_plan.value) == str(of_run.value) and not (tmp_path / "run").exists()


def test_a_budget_without_a_unit_asks_back() -> None:
    with pytest.raises(BadInput, match="^24 bytes\\? For a budget of 24 MiB say 24MiB; for so many bytes, 24B$"):
        parse_bytes("24")
    assert parse_bytes("24B") == parse_bytes(24) == 24 and parse_bytes("2048") == 2048  # a program's number is one


def test_the_last_learning_rate_follows_the_first() -> None:
    assert RunConfig().lr_end == RunConfig.of(lr=0.1).lr_end == 0.01
    assert RunConfig.of(lr=0.001).lr_end == RunOptions.of(lr=0.001).lr_end == 0.0001
    assert RunConfig.of(lr=0.5, lr_end=0.2).lr_end == 0.2
    saved = RunConfig.of(lr=0.3, lr_end=0.3).to_json()
    assert RunConfig.from_json(saved).lr_end == 0.3


class NoNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.conv(x).relu().mean((2, 3)))
        return out


def test_batch_norm_is_named_only_where_there_is_any(tmp_path: Path) -> None:
    from strata.runs.progress import _rows

    for model, says in ((NoNorm(), "%"), (tiny.model(), "% (batch norm re-estimated)")):
        out = tmp_path / type(model).__name__
        result = strata.run(
            model, tiny.data(), "fedavg", out=out, rounds=1, devices=4, per_round=2, workers=0, progress=False
        )
        assert dict(_rows(result))["accuracy"].endswith(says)


def test_data_in_one_line() -> None:
    assert repr(tiny.data()) == "<tiny: 240 training and 60 test samples of 3x8x8, 3 classes>"
    assert repr(tiny.data().test) == "<60 samples of 3x8x8>"


def test_dir_shows_what_users_call() -> None:
    shown = dir(strata)
    assert {"run", "plan", "SLT", "data", "__version__"} <= set(shown)
    assert not {"annotations", "importlib", "Any", "core", "engines"} & set(shown)
    assert all(hasattr(strata, name) for name in shown)


class Branch(NoNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = 2 * x
        return super().forward(x)


def test_a_branch_on_data_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="Branch decides by the values of a tensor which way to go"):
        ChannelGraph(Branch(), (3, 8, 8))
    assert capfd.readouterr() == ("", "")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x)[0][:, -1])
        return out


EXPORTED = """
from strata import BadInput
from strata.graph import ChannelGraph
from tests.runs.test_ease import Branch, Recurrent
ChannelGraph(Recurrent(), (6, 4))
try:
    ChannelGraph(Branch(), (3, 8, 8))
except BadInput:
    print("refused")
"""


def test_torch_says_nothing_of_its_own_where_a_model_is_exported() -> None:
    """In a process of its own: here torch's handlers write to what pytest has put in the place of stderr."""
    environment = {**os.environ, "STRATA_CACHE": "off"}
    ended = subprocess.run(
        [sys.executable, "-c", EXPORTED], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids).mean(1)
        return out


def test_a_model_of_text_is_told_so() -> None:
    with pytest.raises(BadInput, match="looks like a model of text or other ids \\(table is an embedding\\)"):
        ChannelGraph(Words(), (3, 8, 8))


SCRIPT = """
from tests.federation import tiny
from tests.runs.test_ease import NoNorm
class Own(NoNorm):
    pass
import strata
try:
    strata.run(Own(), tiny.data(), "fedavg", rounds=1, devices=4, per_round=2, workers=1, out={out!r})
except strata.BadInput as error:
    print(error)
"""


def test_a_script_from_standard_input_is_one_sentence(tmp_path: Path) -> None:
    script = SCRIPT.format(out=str(tmp_path / "run"))
    ended = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith("the model is defined in an interactive session or a script from standard input")
    assert ended.stdout.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["plan", "run", "compare"])
def test_a_terminal_hears_at_once_what_is_done(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is loaded: the first import after the line is where this test ends."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            if self.getvalue():
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Terminal())
    asked = {
        "plan": ["--constraint", "0.5"],
        "run": ["--out", "runs/a"],
        "compare": ["--methods", "small", "--out", "c"],
    }
    args = build_parser().parse_args([command, *asked[command]])
    with pytest.raises(KeyboardInterrupt):
        args.func(args)
    assert sys.stderr.getvalue().startswith(f"strata {command}: loading torch")  # type: ignore[attr-defined]


def test_what_run_can_be_told_is_all_in_its_help() -> None:
    text = strata.run.__doc__ or ""
    named = {one.name for one in inspect.signature(strata.run).parameters.values()} - {"model", "data", "options"}
    assert [key for key in (named | set(RunOptions.described())) if key not in text] == []


def test_options_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="strata.run has no option learning_rate: there are"):
        tiny_run(tmp_path / "run", learning_rate=1)
