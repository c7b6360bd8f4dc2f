"""SLT follows its plan; early stopping decides from the accuracies it is told."""

from __future__ import annotations

import json

import pytest

from strata.errors import BadInput
from strata.methods import SLT, Progress
from strata.planning import plan
from tests.methods.tiny import tiny_graph

GRAPH = tiny_graph()


def test_follows_the_plans_steps() -> None:
    made = plan(GRAPH, GRAPH.input_shape, constraint=0.5, rounds=20)
    method = SLT(made)
    assert len(made.steps) > 2 and made.steps[-1].scale == 1
    for round in range(20):
        step = made.step_at(round)
        assert method.step(round) == step.step
        (task,) = method.assign(round, [3])
        assert task.cut == GRAPH.slt(step.k_frozen, step.k_trained, step.scale) == method.evaluation_cut(round)
        assert task.cut.frozen == {n for n in GRAPH.parameter_names if GRAPH.layer_of[n] <= step.k_frozen}
    assert method.server_cut() == GRAPH.full()
    assert method.evaluation_cut(19).shapes == GRAPH.full().shapes, "the full model once the scale is 1"
    assert not method.needs_accuracy and method.observe(0, 0.5) is method and method.state == {}


def test_a_stronger_device_freezes_fewer_layers() -> None:
    made = plan(GRAPH, GRAPH.input_shape, constraint=[0.5, 1.0], rounds=20)
    method = SLT(made)
    weak, strong, weak_again = (task.cut for task in method.assign(19, [0, 1, 2]))
    assert weak == weak_again == made.cut(len(made.steps) - 1, level=0)
    assert strong.frozen == frozenset() and weak.frozen, "a device that holds the model freezes nothing"
    assert strong.shapes == weak.shapes, "the weakest fixes the width"


def test_early_stopping_by_hand() -> None:
    # patience 2: round 0 sets the best, 1 equals it (no improvement), 2 falls -> the next step begins in round 3;
    # there 0.3 is a new best although the step before had 0.5
    accuracies = [0.5, 0.5, 0.4, 0.3, 0.6, 0.55, 0.6, 0.1, 0.1, 0.1]
    expected = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    made = plan(GRAPH, GRAPH.input_shape, constraint=0.5, rounds=20, schedule="early-stopping", patience=2)
    method = SLT(made)
    steps = []
    for round, accuracy in enumerate(accuracies):
        assert method.needs_accuracy
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
