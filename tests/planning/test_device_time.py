from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.execution import flops, traffic
from strata.planning import plan
from strata.planning.device_time import PlanTime, Speed, show_time, speed_of, time_of
from tests.federation import tiny


def test_flops_and_bytes_in_seconds() -> None:
    speed = Speed(gflops=2, mbit=5)
    assert speed.training(3e9) == 1.5 and speed.sending(5e6 / 8) == 1.0
    assert speed.seconds(3e9, 5e6 / 8) == 2.5
    assert [show_time(t) for t in (3.0, 150, 3 * 3600, 86400 * 3)] == ["3 s", "2.5 min", "3 h", "3.0 days"]


def test_a_device_that_is_asked_in_every_round() -> None:
    """By hand: three rounds of 4 s and 1 s, two of 6 s and 2 s with 5 s of frozen layers once."""
    taken = PlanTime(Speed(1, 1), 10, rounds=(3, 2, 0), training=(4, 6, 9), sending=(1, 2, 9), once=(0, 5, 9))
    assert (taken.training_in_all, taken.sending_in_all, taken.in_all) == (24, 12, 36)
    assert "a round takes 5 s to 8 s; all 5 rounds, if it is asked in each, 36 s" in str(taken)


def test_of_a_plan() -> None:
    graph = tiny.graph()
    found = plan(graph, batch_size=8, constraint=0.65, rounds=7, schedule="equal")
    taken = time_of(found, Speed(1e-3, 1e-3), samples=20)
    assert sum(taken.rounds) == 7 and taken.rounds[0] == found.steps[0].until_round
    for step in found.steps:
        cut = found.cut(step.step)
        assert taken.training[step.step] == pytest.approx(20 * flops(graph, cut, found.execution).real_train / 1e6)
        assert taken.sending[step.step] == pytest.approx(2 * 8 * traffic(graph, cut).upload / 1e3)
    frozen = [traffic(graph, found.cut(step.step)) for step in found.steps]
    assert sum(taken.once) == pytest.approx(8 * max(one.download - one.upload for one in frozen) / 1e3)
    open_ended = plan(graph, batch_size=8, constraint=0.65, rounds=7, schedule="early-stopping")
    assert sum(time_of(open_ended, Speed(1, 1)).rounds) == 7


@pytest.mark.parametrize(
    ("gflops", "mbit", "says"),
    [("2", None, "need both speeds"), ("0", "5", "above 0"), ("x", "5", "is a number"), ("nan", "5", "above 0")],
)
def test_speeds_that_are_none(gflops: str, mbit: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        speed_of(argparse.Namespace(gflops=gflops, mbit=mbit))
