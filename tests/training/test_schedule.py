from __future__ import annotations

import pytest

from strata.training import cosine, rate


def test_cosine_from_a_tenth_to_a_hundredth() -> None:
    assert cosine(0, 500) == 0.1
    assert cosine(499, 500) == pytest.approx(0.01)
    assert cosine(2, 5) == pytest.approx(0.055), "half way"
    assert cosine(1, 4) == pytest.approx(0.01 + 0.09 * 0.75), "cos 60 degrees = 1/2"
    assert cosine(0, 1) == 0.1, "a single round"
    rates = [cosine(round, 40, start=0.5, end=0.0) for round in range(40)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 0.5 and rates[-1] == pytest.approx(0)


def test_warm_up_by_hand() -> None:
    rates = [rate(round, 8, 0.4, 0.1, warmup=3) for round in range(8)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[3:] == [cosine(round, 5, 0.4, 0.1) for round in range(5)]
    assert rate(0, 1, 0.4, 0.1) == 0.4
