from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from strata.core.errors import BadInput
from strata.runs.callbacks import RunInfo, trackers
from strata.runs.progress import Live, Plain, Silent, display, duration
from tests.federation.tiny import tiny_run


def record(round: int, accuracy: float | None = None, dropped: int = 0) -> dict:
    return {
        "round": round, "step": 2, "lr": 0.1, "train_loss": 1.23456, "accuracy": accuracy, "upload_bytes": 1,
        "download_bytes": 2, "train_flops": 3, "peak_bytes": 4, "dropped": [{}] * dropped,
    }  # fmt: skip


def test_plain_lines_show_what_is_new() -> None:
    file = io.StringIO()
    plain = Plain(file)
    plain.run_begins(RunInfo(Path("run"), "slt", 100, done=2))
    plain.round_ends(record(2, 0.5))
    plain.round_ends(record(3))  # nothing new within seconds
    plain.round_ends(record(4, dropped=2))
    plain.close()
    first, second, third = file.getvalue().splitlines()
    assert first == "slt: rounds 3 to 100"
    assert second.startswith("round 3/100  step 2  loss 1.2346  accuracy 50.00%  ") and second.endswith(" left")
    assert third.startswith("round 5/100  step 2  loss 1.2346  2 dropped")


def test_the_live_bar_shows_round_step_accuracy_and_time() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    live = Live(console)
    live.run_begins(RunInfo(Path("run"), "slt", 10))
    live.round_ends(record(0, 0.25))
    live.round_ends(record(1))
    live.say("the checkpoint [of] round 3 is damaged")
    live.close()
    live.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("slt", "round 2/10", "step 2", "accuracy 25.00%", "left", "the checkpoint [of] round 3 is damaged"):
        assert part in text


def test_the_display_fits_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(display(False)) is Silent
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert type(display()) is Plain
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert type(display()) is Live
    assert duration(59.6) == "1:00" and duration(3723) == "1:02:03"


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert trackers(False, False) == []
    with pytest.raises(BadInput, match=r"pip install 'strata-fl\[tensorboard\]'"):
        trackers(True, False)
    with pytest.raises(BadInput, match=r"pip install 'strata-fl\[mlflow\]'"):
        trackers(False, True)


FAKE_MLFLOW = """
calls = []
def start_run(run_name): calls.append(("start", run_name))
def log_params(params): calls.append(("params", params))
def log_metrics(values, step): calls.append(("metrics", step, values))
def end_run(): calls.append(("end",))
"""


def test_mlflow_hears_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.py").write_text(FAKE_MLFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    result = tiny_run(tmp_path / "run", rounds=2, mlflow=True)
    calls = sys.modules["mlflow"].calls
    assert calls[0] == ("start", "run") and calls[1][1]["rounds"] == "2" and calls[-1] == ("end",)
    assert [call[1] for call in calls if call[0] == "metrics"] == [0, 1]
    assert calls[-2][2]["accuracy"] == result.accuracy
    monkeypatch.delitem(sys.modules, "mlflow")


SCRIPT = """
import torch
from torch import nn
import strata
from tests.federation import tiny
from strata.graph import ChannelGraph

class Net(tiny.TinyNet):
    pass

def work():
    torch.manual_seed(0)
    model = Net()
    graph = ChannelGraph(model, (3, 8, 8))
    method = strata.FD(graph, constraints=(0.5,), seed=0)
    result = strata.run(model, tiny.data(), method, out={out!r}, rounds=2, devices=12, per_round=4, workers=2,
                        progress=False)
    print(result.accuracy)

{call}
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_model_defined_in_the_script_itself(tmp_path: Path, guarded: bool) -> None:
    call = "if __name__ == '__main__':\n    work()" if guarded else "work()"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(out=str(tmp_path / "run"), call=call))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    if guarded:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "run" / "model.safetensors").exists()
    else:
        assert done.returncode == 1 and "put the call under `if __name__ == '__main__':`" in done.stderr


def test_a_model_defined_in_a_module_that_is_run(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").touch()
    script = SCRIPT.format(out=str(tmp_path / "run"), call="if __name__ == '__main__':\n    work()")
    (package / "train.py").write_text(f"from . import helper\n{script}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "mine.train"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_tensorboard_files_hold_every_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tiny_run(tmp_path / "run", rounds=2, tensorboard=True)
    events = EventAccumulator(str(result.out / "tensorboard"))
    events.Reload()
    seen = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    expected = [(record["round"], pytest.approx(record["train_loss"])) for record in result.metrics]
    assert seen["train_loss"] == expected and len(seen["accuracy"]) == 2


def test_a_tracker_that_fails_costs_a_line_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = FAKE_MLFLOW.replace('calls.append(("metrics", step, values))', 'raise RuntimeError("server gone")')
    (tmp_path / "mlflow.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    result = tiny_run(tmp_path / "run", rounds=2, mlflow=True)
    assert len(result.metrics) == 2
    assert (result.out / "run.log").read_text().count("MLflow stopped taking records: server gone") == 1
    (tmp_path / "mlflow.py").write_text("def start_run(run_name): raise RuntimeError('no such server')")
    monkeypatch.delitem(sys.modules, "mlflow")
    with pytest.raises(BadInput, match="MLflow could not start: no such server"):
        tiny_run(tmp_path / "other", rounds=2, mlflow=True)
    monkeypatch.delitem(sys.modules, "mlflow")
