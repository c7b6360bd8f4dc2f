"""Who is sampled, in a fleet that changes: by hand, and without a change as in one that does not."""

from __future__ import annotations

import pytest

from strata.core.errors import BadInput
from strata.federation.membership import JOINED, LEFT, MembershipLog, Present
from strata.federation.simulated_fleet import SimulatedFleet


def sample(present: Present, round: int, attempt: int = 0) -> list[int]:
    fleet = SimulatedFleet(3, present.numbers)
    return fleet.sample(round, attempt, present.per_round, (), lambda device: device in present.members)


def log() -> MembershipLog:
    """Of two devices; in round 1 a third came, in its second attempt the first left, in round 4 it came back."""
    made = MembershipLog(2)
    made.add(1, 0, 2, JOINED)
    made.add(1, 1, 0, LEFT)
    made.add(4, 0, 0, JOINED)
    made.add(4, 0, 3, JOINED)
    return made


def test_the_log_says_who_was_there_in_every_attempt() -> None:
    made = log()
    assert made.numbers == 4
    assert [sorted(made.members(*at)) for at in ((0, 0), (0, 9), (1, 0), (1, 1), (3, 9), (4, 0))] == [
        [0, 1], [0, 1], [0, 1, 2], [1, 2], [1, 2], [0, 1, 2, 3]]  # fmt: skip
    assert made.present(0, 0, 3) == Present(2, frozenset({0, 1}), 2)
    assert made.present(1, 0, 3) == Present(3, frozenset({0, 1, 2}), 3, joined=(2,))
    assert made.present(1, 1, 3) == Present(3, frozenset({1, 2}), 2, joined=(2,), left=(0,))
    assert made.present(2, 0, 3) == Present(3, frozenset({1, 2}), 2)
    assert made.present(4, 0, 3).to_json() == {"joined": [0, 3], "left": []}


def test_the_same_log_gives_the_same_sample() -> None:
    made = log()
    again = MembershipLog.from_json(2, made.to_json())
    for round in range(30):
        present = made.present(round, 0, 2)
        assert sample(present, round) == sample(again.present(round, 0, 2), round)
        assert set(sample(present, round)) <= present.members
    assert {device for round in range(4, 30) for device in sample(made.present(round, 0, 2), round)} == {0, 1, 2, 3}
    still = MembershipLog(5)  # nobody comes or goes: the sample of a fleet that is fixed
    for round in range(10):
        assert sample(still.present(round, 0, 3), round) == SimulatedFleet(3, 5).sample(round, 0, 3)


def test_a_round_that_is_run_again_begins_as_it_began() -> None:
    made = log()
    made.go_back(1)
    assert made.to_json() == [[1, 0, 2, "joined"]] and made.numbers == 3
    made.go_back(0)
    assert made.to_json() == [] and made.numbers == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        [None],
        [[1, 0, 2]],
        [[1, 0, 2, "came"]],
        [[1, 0, -1, "left"]],
        [[True, 0, 2, "joined"]],
        [[1, 0, 3, "joined"]],
        [[1, 0, 2, "left"]],
    ],
)
def test_a_log_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(BadInput, match="bring fleet.json back"):
        MembershipLog.from_json(2, wrong)
