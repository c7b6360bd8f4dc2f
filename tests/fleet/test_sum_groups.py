"""Who is summed with whom, and who is found to spoil sums."""

from __future__ import annotations

import pytest

from strata.fleet.server.sum_groups import LEFT_OUT, SumGroups


def test_all_in_one_sum_where_nothing_is_compared() -> None:
    groups = SumGroups(3)
    made, excused = groups.of([4, 1, 2, 0, *range(5, 20)], "")
    assert made == [[0, 1, 2, *range(4, 20)]] and not excused
    assert groups.of([4, 1], "")[0] == []
    assert "2 of its kind in this round, and a sum is over at least 3" in groups.of([4, 1], "")[1][4]


@pytest.mark.parametrize(("devices", "sizes"), [(8, [8]), (10, [3, 3, 4]), (20, [5, 5, 5, 5]), (22, [5, 5, 6, 6])])
def test_several_sums_where_they_are_compared(devices: int, sizes: list[int]) -> None:
    groups = SumGroups(3, compared=True)
    made, excused = groups.of(list(range(devices)), "a")
    assert sorted(map(len, made)) == sizes and sorted(sum(made, [])) == list(range(devices)) and not excused
    assert groups.of(list(range(devices)), "a")[0] == made
    assert devices == 8 or groups.of(list(range(devices)), "b")[0] != made  # other ones each round


def test_who_was_in_a_bad_sum_is_summed_in_small_ones() -> None:
    groups = SumGroups(3)
    groups.bad(range(8))
    made, excused = groups.of(list(range(12)), "")
    assert made[0] == [8, 9, 10, 11] and sorted(map(len, made[1:])) == [4, 4] and not excused
    groups.good(made[1])
    made, excused = groups.of(list(range(12)), "")
    assert sorted(map(len, made)) == [4, 8] and not excused


def test_too_few_to_be_summed_by_themselves_are_among_the_others() -> None:
    groups = SumGroups(3)
    groups.bad([7])
    assert groups.of([0, 1, 2, 7], "") == ([[0, 1, 2, 7]], {})
    groups.bad(range(4))
    assert sorted(map(len, groups.of([0, 1, 2, 3, 4, 7], "")[0])) == [3, 3]  # not all six in one


def test_a_group_that_stays_bad_is_mixed_with_the_others() -> None:
    """Else the honest ones among them would never be heard."""
    groups = SumGroups(3, compared=True)
    for _ in range(2):
        groups.bad([0, 1, 2])
    (made, _) = groups.of([0, 1, 2, 3, 4, 5], "x")  # too few others to test one alone
    assert len(made) == 2 and [0, 1, 2] not in made


def test_who_spoils_its_own_test_is_left_out_and_comes_back() -> None:
    groups = SumGroups(3)
    groups.bad([0, 1, 2]), groups.bad([0])
    for time in range(2):
        made, _ = groups.of(list(range(12)), f"{time}")
        (test,) = (group for group in made if 0 in group)
        assert len(test) == 4 and not {1, 2} & set(test)  # three clean ones are enough for a sum without it
        assert groups.bad(test) == [0]
        assert set(groups.strikes) == {0, 1, 2}  # the clean ones are not blamed
        for _ in range(LEFT_OUT << time):
            made, excused = groups.of(list(range(12)), "")
            assert 0 not in sum(made, []) and "left out of this run's sums for a while" in excused[0]
    made, excused = groups.of(list(range(12)), "")
    (test,) = (group for group in made if 0 in group)
    groups.good(test)
    assert 0 not in groups.strikes and not excused


def test_who_fails_in_a_small_sum_is_tested_alone() -> None:
    groups = SumGroups(3)
    groups.failed(0)  # nothing is held against who merely fails
    assert groups.of([0, 1, 2, 3], "")[0] == [[0, 1, 2, 3]]
    groups.bad([0, 1, 2])
    groups.failed(0)
    made, _ = groups.of(list(range(12)), "")
    assert next(len(group) for group in made if 0 in group) == 4 and groups.tested == {0}


def test_who_lied_is_in_no_further_sum() -> None:
    groups = SumGroups(3)
    groups.bar({2: "revealed another share than it was dealt"})
    made, excused = groups.of([0, 1, 2, 3], "")
    assert made == [[0, 1, 3]] and "it revealed another share" in excused[2]


@pytest.mark.parametrize(("devices", "hostile", "share"), [(20, 5, 0.85), (20, 2, 0.95), (10, 1, 0.9)])
def test_those_that_spoil_sums_are_found(devices: int, hostile: int, share: float) -> None:
    """All rounds but the first ten: the others are nearly always heard, and no honest one was ever left out."""
    groups, spoiling = SumGroups(3, compared=True), set(range(hostile))
    heard = []
    for round in range(40):
        made, _ = groups.of(list(range(devices)), f"{round}")
        good = [group for group in made if not spoiling & set(group)]
        for group in made:
            if group in good:
                groups.good(group)
            else:
                groups.bad(group)
        heard.append(sum(map(len, good)))
    assert sum(heard[10:]) / 30 > share * (devices - hostile)
    assert set(groups.times) == spoiling
