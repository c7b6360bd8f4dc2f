"""SLT follows its plan; early stopping decides from the accuracies it is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.graph.filling import filled
from strata.methods import SLT, Progress
from strata.runs.callbacks import Callback, StopRun
from tests.federation.tiny import bits, method, tiny_run
from tests.methods.tiny import hand_plan, tiny_graph, tiny_state


def test_follows_the_plans_steps() -> None:
    method = SLT(hand_plan(tiny_graph(), (0, 0, 0.25, 2), (0, 1, 0.5, 2), (1, 2, 0.5, 5), (2, 3, 1.0, 7)))
    configurations = [(0, 0, 0.25), (0, 1, 0.5), (1, 2, 0.5), (2, 3, 1.0)]
    assert [method.step(round) for round in range(8)] == [0, 0, 2, 2, 2, 3, 3, 3], "step 1 has no round"
    for round in range(7):
        k_frozen, k_trained, scale = configurations[method.step(round)]
        (task,) = method.assign(round, [3])
        assert task.cut == tiny_graph().slt(k_frozen, k_trained, scale) == method.evaluation_cut(round)
        assert task.cut.frozen == {n for n in tiny_graph().parameter_names if tiny_graph().layer_of[n] <= k_frozen}
    assert method.evaluation_cut(2).shapes["conv2.weight"] == (4, 8, 3, 3)
    assert method.server_cut() == tiny_graph().full()
    assert method.evaluation_cut(6).shapes == tiny_graph().full().shapes, "the full model once the scale is 1"
    assert not method.needs_accuracy and method.observe(0, 0.5) is method and method.state == {}


def test_a_stronger_device_freezes_fewer_layers() -> None:
    method = SLT(
        hand_plan(tiny_graph(), (0, 0, 0.25, 1), (0, 1, 0.5, 2), (1, 2, 0.5, 9), levels=[(0, 0, 1), (0, 0, 0)])
    )
    weak, strong, weak_again = (task.cut for task in method.assign(5, [0, 1, 2]))
    assert weak == weak_again == tiny_graph().slt(1, 2, 0.5) == method.evaluation_cut(5)
    assert strong == tiny_graph().slt(0, 2, 0.5)
    assert strong.frozen == frozenset() and weak.frozen == {"stem.0.weight", "stem.1.weight", "stem.1.bias"}
    assert strong.shapes == weak.shapes, "the weakest fixes the width"


def test_early_stopping_by_hand() -> None:
    # patience 2: round 0 sets the best, 1 equals it (no improvement), 2 falls -> the next step begins in round 3;
    # there 0.3 is a new best although the step before had 0.5
    accuracies = [0.5, 0.5, 0.4, 0.3, 0.6, 0.55, 0.6, 0.1, 0.1, 0.1]
    expected = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    configurations = [(0, 0, 0.25, None), (0, 1, 0.5, None), (1, 2, 0.5, None), (2, 3, 1.0, None)]
    made = hand_plan(tiny_graph(), *configurations, patience=2)
    method = SLT(made)
    steps = []
    for round, accuracy in enumerate(accuracies):
        assert method.needs_accuracy, "another step may follow"
        steps.append(method.step(round))
        before = method
        method = method.observe(round, accuracy)
        resumed = SLT(made).with_state(json.loads(json.dumps(method.state)))
        assert resumed == method, "the state survives a checkpoint"
        assert before.step(round) == method.step(round) == steps[-1], "what is decided stays"
    assert steps == expected
    assert [method.step(round) for round in range(10)] == expected
    assert method.progress == Progress(starts=(0, 3, 7, 10)), "0.1 was the best of its step, twice not exceeded"
    assert method.evaluation_cut(8) == made.cut(2)
    assert not method.needs_accuracy and method.observe(10, 0.9) is method, "round 10 begins the last step"
    with pytest.raises(BadInput):
        method.with_state({"starts": None})


def test_early_stopping_stays_at_the_last_step() -> None:
    progress = Progress()
    for round in range(20):
        progress = progress.after(round, 0.1, patience=1, last_step=2)
    assert progress.starts == (0, 2, 4)


def test_early_stopping_is_not_confused_by_nan() -> None:
    """An accuracy that is not a number is no improvement."""
    assert Progress(best=0.2).after(4, float("nan"), patience=5, last_step=2) == Progress(best=0.2, rounds_since_best=1)


def test_new_channels_are_filled_where_a_step_begins() -> None:
    made = hand_plan(tiny_graph(), (0, 0, 0.25, 2), (0, 1, 0.5, 2), (1, 2, 0.5, 5), (2, 3, 1.0, 7))
    published, zero = SLT(made), SLT(made, fill="zero")
    state = tiny_state()
    assert all(published.begin(round, state) is state for round in range(7))
    assert [zero.begin(round, state) is not state for round in range(7)] == [
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert all(torch.equal(tensor, state[name]) for name, tensor in zero.begin(0, state).items()), "nothing is old yet"
    # step 1 has no round
    expected = filled(tiny_graph(), "zero", made.cut(0), made.cut(2), state, generator(0, "fill", 2))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in zero.begin(2, state).items())
    one, other, again = (SLT(made, fill="copies", seed=seed).begin(2, state)["conv1.weight"] for seed in (0, 1, 0))
    assert torch.equal(one, again) and not torch.equal(one, other)
    with pytest.raises(BadInput, match="the fill of slt is one of published, fan-in, zero, copies, not 'ones'"):
        SLT(made, fill="ones")


def test_a_filled_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Stopped after every round, so at every step change too."""

    class Stop(Callback):
        def round_ends(self, record: Mapping[str, Any]) -> StopRun | None:
            raise KeyboardInterrupt

    plan = method("slt").plan  # type: ignore[attr-defined]
    results = {}
    for fill in ("published", "copies"):
        tiny_run(tmp_path / fill, method=SLT(plan, fill=fill, seed=3))
        results[fill] = bits(tmp_path / fill)
    assert results["published"] != results["copies"]
    for resumed in range(6):
        with contextlib.suppress(KeyboardInterrupt):
            tiny_run(tmp_path / "cut", method=SLT(plan, fill="copies", seed=3), resume=resumed > 0, callbacks=[Stop()])
    tiny_run(tmp_path / "cut", method=SLT(plan, fill="copies", seed=3), resume=True)
    assert bits(tmp_path / "cut") == results["copies"]
    with pytest.raises(BadInput, match="fill"):
        tiny_run(tmp_path / "cut", method=SLT(plan), resume=True)
