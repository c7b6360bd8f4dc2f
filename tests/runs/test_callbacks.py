"""Callbacks hear of everything, may end a run cleanly, and cannot break it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import strata
from strata.core.errors import BadInput
from strata.runs import session
from strata.runs.callbacks import Callback, EarlyStop, Evaluated, KeepBest, RunInfo, StopRun, score_of
from strata.runs.metrics import METRIC_KEYS
from strata.runs.session import Result
from tests.federation import tiny
from tests.federation.tiny import bits, tiny_run


class Heard(Callback):
    """Notes what it hears, and stops after a round if it is told to."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.stop_after = stop_after

    def run_begins(self, run: RunInfo) -> None:
        self.events.append(("begins", (run.method, run.done, run.rounds)))

    def evaluated(self, evaluation: Evaluated) -> None:
        self.events.append(("evaluated", (evaluation.round, evaluation.accuracy)))

    def round_ends(self, record: Mapping[str, Any]) -> None:
        self.events.append(("round", record["round"]))
        if record["round"] + 1 == self.stop_after:
            raise StopRun("enough")

    def run_ends(self, result: Result) -> None:
        self.events.append(("ends", result.accuracy))

    def close(self) -> None:
        self.events.append(("close", None))


class Broken(Callback):
    def round_ends(self, record: Mapping[str, Any]) -> None:
        raise RuntimeError("out of luck")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return tiny_run(tmp_path_factory.mktemp("whole") / "run")


def test_every_hook_in_order_and_no_bit_moves(whole: Result, tmp_path: Path) -> None:
    heard = Heard()
    result = tiny_run(tmp_path / "run", callbacks=[heard, Broken()], eval_every=2)
    accuracies = {record["round"]: record["accuracy"] for record in result.metrics}
    expected: list[tuple[str, Any]] = [("begins", ("fd", 0, tiny.ROUNDS))]
    for round in range(tiny.ROUNDS):
        if (round + 1) % 2 == 0:
            expected.append(("evaluated", (round, accuracies[round])))
        expected.append(("round", round))
    assert heard.events == [*expected, ("ends", result.accuracy), ("close", None)]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == bits(whole.out)[1]
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("Broken stopped taking records: out of luck") == 1


def test_a_run_that_is_stopped_is_finished(whole: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    heard = Heard(stop_after=3)
    result = tiny_run(out, callbacks=[heard], checkpoint_every=100, progress=True)
    assert "ended after 3 of 6 rounds: enough" in capsys.readouterr().err
    assert result.summary["stopped"] == "enough" and result.summary["rounds"] == 3
    assert bits(out)[0] == bits(whole.out)[0][:3] and heard.events[-2:] == [("ends", result.accuracy), ("close", None)]
    assert result.accuracy == whole.metrics[2]["accuracy"]
    model = tiny.TinyNet()
    model.load_state_dict(result.state_dict())
    assert accuracy(model) == pytest.approx(result.accuracy)
    before, summary = bits(out), (out / "summary.json").read_bytes()
    again = tiny_run(out, resume=True)  # nothing to do, with or without the callback
    assert again.summary == result.summary and bits(out) == before and (out / "summary.json").read_bytes() == summary
    assert "stopped" not in whole.summary and whole.summary["rounds"] == tiny.ROUNDS


def accuracy(model: torch.nn.Module) -> float:
    test = tiny.data().test
    model.eval()
    with torch.inference_mode():
        return (model(test.normalise(test.images)).argmax(1) == test.labels).double().mean().item()


def predicted_end(scores: list[float], patience: int) -> int:
    """The number of rounds after which EarlyStop ends a run with these accuracies."""
    best, waited = scores[0], 0
    for number, score in enumerate(scores[1:], start=2):
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == patience:
            return number
    return len(scores)


def test_early_stop_interrupted_anywhere_ends_in_the_same_round_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = {"lr": 1e-6, "lr_end": 1e-6}  # nothing is learnt: the accuracy stays where it is
    rounds = 6
    scores = [record["accuracy"] for record in tiny_run(tmp_path / "whole", rounds=rounds, **falling).metrics]
    ends = predicted_end(scores, 2)
    assert 3 <= ends < rounds
    early = tiny_run(tmp_path / "early", rounds=rounds, callbacks=[EarlyStop(patience=2)], **falling)
    assert early.summary["rounds"] == len(early.metrics) == ends and "in 2 evaluations" in early.summary["stopped"]

    original, count = session.play, 0

    def breaks(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise ZeroDivisionError
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(session, "play", breaks)
        tiny_run(tmp_path / "resumed", rounds=rounds, callbacks=[EarlyStop(patience=2)], **falling)
    tiny_run(tmp_path / "resumed", rounds=rounds, callbacks=[EarlyStop(patience=2)], resume=True, **falling)
    assert bits(tmp_path / "resumed") == bits(tmp_path / "early")
    for name in ("summary.json", "model.safetensors"):  # as if it had been killed between its stop and its end
        (tmp_path / "resumed" / name).unlink()
    again = tiny_run(tmp_path / "resumed", rounds=rounds, callbacks=[EarlyStop(patience=2)], resume=True, **falling)
    assert bits(tmp_path / "resumed") == bits(tmp_path / "early") and again.summary["stopped"]


def test_the_best_model_is_kept(whole: Result, tmp_path: Path) -> None:
    keep = KeepBest()
    result = tiny_run(tmp_path / "run", callbacks=[keep])
    scores = [record["accuracy"] for record in result.metrics]
    best = json.loads((result.out / "best.json").read_text())
    assert best == {"round": scores.index(max(scores)), "accuracy": max(scores)} and keep.best == max(scores)
    model = tiny.TinyNet()
    model.load_state_dict(load_file(result.out / "best.safetensors"))
    assert accuracy(model) == pytest.approx(max(scores)) and bits(result.out) == bits(whole.out)


def test_a_validation_split_is_what_decides(tmp_path: Path) -> None:
    keep = KeepBest()
    result = tiny_run(tmp_path / "run", callbacks=[keep], validation=0.2, eval_every=2)
    judged = [record for record in result.metrics if record["accuracy"] is not None]
    assert len(judged) == 3 and all(0 <= record["validation_accuracy"] <= 1 for record in judged)
    assert tuple(key for key in judged[0] if key != "validation_accuracy") == METRIC_KEYS
    assert keep.best == max(score for record in result.metrics if (score := score_of(record)) is not None)
    assert result.metrics[0]["validation_accuracy"] is None
    plain = tiny_run(tmp_path / "plain", validation=0.2, eval_every=2)
    assert all(tuple(record) == METRIC_KEYS for record in plain.metrics), "only where somebody judges by it"
    assert bits(plain.out)[1] == bits(result.out)[1]


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a callback is an object of a class made from strata.Callback, not"):
        tiny_run(tmp_path / "run", callbacks=[print])
    with pytest.raises(BadInput, match="patience of EarlyStop is 1 or more"):
        strata.EarlyStop(patience=0)
    assert not (tmp_path / "run").exists()


class Refuses(Callback):
    def run_begins(self, run: RunInfo) -> None:
        raise BadInput("not on a Sunday")


class Stumbles(Heard):
    def run_begins(self, run: RunInfo) -> None:
        raise RuntimeError("no such server")


def test_a_callback_may_refuse_at_the_beginning_or_fail_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not on a Sunday"):
        tiny_run(tmp_path / "a", rounds=1, callbacks=[Refuses()])
    stumbles = Stumbles()
    tiny_run(tmp_path / "b", rounds=1, callbacks=[stumbles])
    assert stumbles.events == [] and "could not start: no such server" in (tmp_path / "b" / "run.log").read_text()


def test_going_back_gives_the_bits_of_a_run_that_never_went_wrong(whole: Result, tmp_path: Path) -> None:
    """Rounds 2 and 3 are as a device that lies left them; the older checkpoint was kept."""
    out = tmp_path / "run"
    original = session.play

    def poisoned(state: Any, *rest: Any) -> Any:
        if state.round == 4:
            raise ZeroDivisionError
        after, costs = original(state, *rest)
        if state.round >= 2:
            after.tensors["classifier.weight"].mul_(1000)
        return after, costs

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(session, "play", poisoned)
        tiny_run(out, keep_every=2)
    assert sorted(path.name for path in (out / "checkpoint").glob("*.json"))[1:] == [
        "round-00000002.json",
        "round-00000003.json",
        "round-00000004.json",
    ]
    with pytest.raises(BadInput, match="give resume too"):
        tiny_run(tmp_path / "new", from_round=2)
    tiny_run(out, keep_every=2, resume=True, from_round=2)
    assert bits(out) == bits(whole.out)
