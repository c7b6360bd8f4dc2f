"""Who is summed with whom, and who is found to spoil sums."""

from __future__ import annotations

import pytest

from strata.fleet.server.sum_groups import LEFT_OUT, SumGroups


def test_all_in_one_sum_where_nothing_is_compared() -> None:
    groups = SumGroups(3)
    assert groups.of([4, 1, 2, 0, *range(5, 20)], "") == [[0, 1, 2, *range(4, 20)]]
    assert groups.of([4, 1], "") == []


@pytest.mark.parametrize(
    ("devices", "sizes"), [(8, [8]), (10, [3, 3, 4]), (20, [4, 4, 4, 4, 4]), (22, [4, 4, 4, 5, 5])]
)
def test_several_sums_where_they_are_compared(devices: int, sizes: list[int]) -> None:
    groups = SumGroups(3, compared=True)
    made = groups.of(list(range(devices)), "a")
    assert sorted(map(len, made)) == sizes and sorted(sum(made, [])) == list(range(devices))
    assert groups.of(list(range(devices)), "a") == made
    assert devices == 8 or groups.of(list(range(devices)), "b") != made  # other ones each round


def test_who_failed_before_is_dealt_evenly() -> None:
    """A sum of four stands the loss of one."""
    groups = SumGroups(3, compared=True)
    for device in (1, 2, 3, 4, 5):
        groups.failed(device)
    assert all(len({1, 2, 3, 4, 5} & set(group)) == 1 for group in groups.of(list(range(20)), ""))
    groups.good([1, 2, 3, 4, 5])
    assert not groups.failures


def test_who_was_in_a_bad_sum_is_summed_in_small_ones() -> None:
    groups = SumGroups(3)
    groups.bad(range(8))
    made = groups.of(list(range(12)), "")
    assert made[0] == [8, 9, 10, 11] and sorted(map(len, made[1:])) == [4, 4]
    groups.good(made[1])
    made = groups.of(list(range(12)), "")
    assert sorted(map(len, made)) == [4, 8]


def test_too_few_to_be_summed_by_themselves_are_among_the_others() -> None:
    groups = SumGroups(3)
    groups.bad([7])
    assert groups.of([0, 1, 2, 7], "") == [[0, 1, 2, 7]]
    groups.bad(range(4))
    assert sorted(map(len, groups.of([0, 1, 2, 3, 4, 7], ""))) == [3, 3]  # not all six in one


def test_a_group_that_stays_bad_is_mixed_with_the_others() -> None:
    """Else the honest ones among them would never be heard."""
    groups = SumGroups(3, compared=True)
    for _ in range(2):
        groups.bad([0, 1, 2])
    made = groups.of([0, 1, 2, 3, 4, 5], "x")  # too few others to test one alone
    assert len(made) == 2 and [0, 1, 2] not in made


def test_who_spoils_its_own_test_is_left_out_and_comes_back() -> None:
    groups = SumGroups(3)
    groups.bad([0, 1, 2]), groups.bad([0])
    for time in range(2):
        made = groups.of(list(range(12)), f"{time}")
        (test,) = (group for group in made if 0 in group)
        assert len(test) == 4 and not {1, 2} & set(test)  # three clean ones are enough for a sum without it
        assert groups.bad(test) == [0]
        assert set(groups.strikes) == {0, 1, 2}  # the clean ones are not blamed
        for _ in range(LEFT_OUT << time):
            assert "left out of this run's sums for a while" in groups.excused(range(12))[0]
        assert groups.excused(range(12)) == {}
    made = groups.of(list(range(12)), "")
    (test,) = (group for group in made if 0 in group)
    groups.good(test)
    assert 0 not in groups.strikes


def test_who_fails_in_a_small_sum_is_tested_alone() -> None:
    groups = SumGroups(3)
    groups.failed(0)  # nothing is held against who merely fails
    assert groups.of([0, 1, 2, 3], "") == [[0, 1, 2, 3]]
    groups.bad([0, 1, 2])
    groups.failed(0)
    made = groups.of(list(range(12)), "")
    assert next(len(group) for group in made if 0 in group) == 4 and groups.tested == {0}


def test_who_lied_is_in_no_further_sum() -> None:
    groups = SumGroups(3)
    groups.bar({2: "revealed another share than it was dealt"})
    (excused,) = groups.excused([0, 1, 2, 3]).items()
    assert excused == (2, "left out of this run's sums: it revealed another share than it was dealt")


@pytest.mark.parametrize(("devices", "hostile", "share"), [(20, 5, 0.85), (20, 2, 0.95), (10, 1, 0.9)])
def test_those_that_spoil_sums_are_found(devices: int, hostile: int, share: float) -> None:
    """All rounds but the first ten: the others are nearly always heard, and no honest one was ever left out."""
    groups, spoiling = SumGroups(3, compared=True), set(range(hostile))
    heard = []
    for round in range(40):
        out = groups.excused(range(devices))
        made = groups.of([device for device in range(devices) if device not in out], f"{round}")
        good = [group for group in made if not spoiling & set(group)]
        for group in made:
            if group in good:
                groups.good(group)
            else:
                groups.bad(group)
        heard.append(sum(map(len, good)))
    assert sum(heard[10:]) / 30 > share * (devices - hostile)
    assert set(groups.times) == spoiling
