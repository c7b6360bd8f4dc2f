"""Which sums of a round stand out."""

from __future__ import annotations

import numpy as np
import pytest

from strata.fleet.server.compared_sums import standing_out

STEP = 1e-6


def means(count: int, seed: int = 0, chance: float = 1.0) -> list[np.ndarray]:
    """Of honest groups: something in common, and something by chance."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=2000)
    return [common + chance * draw.normal(size=2000) for _ in range(count)]


@pytest.mark.parametrize(("count", "chance"), [(1, 9.0), (2, 0.7), (3, 9.0), (4, 9.0), (7, 9.0)])
def test_honest_sums_do_not(count: int, chance: float) -> None:
    for seed in range(50):
        assert standing_out(means(count, seed, chance), STEP) == {}


def test_by_hand() -> None:
    made = [np.array(values) for values in ([0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [3.0, 4.0])]
    assert standing_out(made, 0.0) == {3: "it is 6.08 times as far from the others as is usual among them"}
    # the median is (0.5, 0.5): the others are 0.707 away from it, that one sqrt(2.5^2 + 3.5^2) = 4.301: 6.08 times


@pytest.mark.parametrize(("count", "bad"), [(3, 1), (4, 1), (5, 2), (9, 4)])
def test_fewer_than_half_are_found_though_they_agree(count: int, bad: int) -> None:
    for seed in range(20):
        made = means(count, seed)
        for place in range(bad):
            made[place] = made[place] + 8.0
        assert set(standing_out(made, STEP)) == set(range(bad))


def test_half_of_them_are_not() -> None:
    """What the documentation says does not hold."""
    made = means(4)
    for place in (0, 1):
        made[place] = made[place] + 8.0
    assert standing_out(made, STEP) == {}


def test_what_passes_is_small() -> None:
    """A lie as large as chance itself is not seen; the mean of all is then off by less than they differ by."""
    made = means(5)
    made[0] = made[0] + 1.0
    assert standing_out(made, STEP) == {}


def test_of_two_that_differ_the_smaller_is_used() -> None:
    first, second = means(2)
    assert set(standing_out([first + 8.0, second], STEP)) == {0}
    assert set(standing_out([first, second - 8.0], STEP)) == {1}


def test_what_rounding_does_is_no_difference() -> None:
    same = np.zeros(100)
    assert standing_out([same, same, same, same + STEP], STEP) == {}
    assert standing_out([same, same + STEP], STEP) == {}
    assert set(standing_out([same, same, same + 1], STEP)) == {2}
