"""Who is summed with whom once a sum made no sense."""

from __future__ import annotations

from strata.fleet.server.sum_groups import SumGroups


def test_all_in_one_sum_as_long_as_sums_are_good() -> None:
    groups = SumGroups(3)
    assert groups.of([4, 1, 2, 0], "") == ([[0, 1, 2, 4]], {})
    assert groups.of([4, 1], "")[0] == []
    assert "2 of its kind in this round, and a sum is over at least 3" in groups.of([4, 1], "")[1][4]


def test_who_was_in_a_bad_sum_is_summed_in_small_ones() -> None:
    groups = SumGroups(3)
    groups.bad(range(8))
    made, excused = groups.of(list(range(10)), "")
    assert sorted(map(len, made)) == [3, 3, 4] and not excused  # 8 and 9 are too few for a sum of their own
    groups.good([0, 1, 2])
    made, excused = groups.of(list(range(10)), "")
    assert made[0] == [0, 1, 2, 8, 9] and made[1] == [3, 4, 5, 6, 7] and not excused


def test_who_is_left_out_comes_back() -> None:
    groups = SumGroups(3)
    groups.bad([7]), groups.bad([7])
    made = [groups.of([0, 1, 2, 7], "")[0] for _ in range(4)]
    assert made == [[[0, 1, 2]]] * 3 + [[[0, 1, 2, 7]]]  # twice in a bad sum: three times


def test_who_fails_in_a_small_sum_is_summed_with_the_worst() -> None:
    groups = SumGroups(3)
    groups.failed(0)  # nothing is held against who merely fails
    assert groups.of([0, 1, 2, 3], "")[0] == [[0, 1, 2, 3]]
    groups.bad(range(6))
    for device in (0, 2, 4):
        groups.failed(device)
    assert groups.of([0, 1, 2, 3, 4, 5], "")[0] == [[0, 2, 4], [1, 3, 5]]


def test_who_lied_is_in_no_further_sum() -> None:
    groups = SumGroups(3)
    groups.bar({2: "revealed another share than it was dealt"})
    made, excused = groups.of([0, 1, 2, 3], "")
    assert made == [[0, 1, 3]] and "it revealed another share" in excused[2]


def test_those_that_spoil_sums_end_up_among_themselves() -> None:
    """Of 15 devices 5 spoil every sum that they are in: from the 20th round on the others are nearly always heard."""
    groups, spoiling = SumGroups(3), set(range(5))
    heard = []
    for round in range(40):
        made, _ = groups.of(list(range(15)), f"{round}")
        good = [group for group in made if not spoiling & set(group)]
        for group in made:
            (groups.good if group in good else groups.bad)(group)
        heard.append(sum(map(len, good)))
    assert sum(heard[20:]) / 20 > 8
