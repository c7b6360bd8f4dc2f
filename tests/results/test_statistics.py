"""Mean and deviation by hand: 72, 74 and 76 are 74 ± 2 (sample; the population's deviation would be 1.63)."""

from __future__ import annotations

import math

import pytest

from strata.results.curves import over_rounds
from strata.results.statistics import deviation, mean, show, show_percent


def test_by_hand() -> None:
    assert mean([72, 74, 76]) == 74
    assert deviation([72, 74, 76]) == 2
    assert deviation([0.4, 0.5]) == pytest.approx(0.1 / math.sqrt(2))
    assert deviation([1, 1, 1, 5]) == 2  # mean 2; squares 1 + 1 + 1 + 9 over 3


def test_one_seed_has_no_deviation() -> None:
    assert deviation([74]) is None and deviation([]) is None
    assert show(74, deviation([74])) == "74.0"


def test_shown() -> None:
    assert show(74, 2) == "74.0 ± 2.0" and show(74.25, 0, 2) == "74.25 ± 0.00"
    assert show_percent(0.41, 0.0141) == "41.00 ± 1.41" and show_percent(0.5, None) == "50.00"


def test_a_curve_is_over_the_rounds_and_runs_that_were_evaluated() -> None:
    def run(*accuracies: float | None) -> list[dict[str, float | None]]:
        return [{"round": n, "accuracy": a, "upload_bytes": 10.0 * (n + 1)} for n, a in enumerate(accuracies)]

    curve = over_rounds([run(0.1, 0.2, None, 0.6), run(0.3, None, 0.5, 0.8), run(None, None)])
    assert curve.rounds == (1, 4) and curve.runs == 2
    assert curve.mean == pytest.approx((0.2, 0.7)) and curve.percent == pytest.approx([20, 70])
    assert curve.std == pytest.approx([0.1 * math.sqrt(2)] * 2) and curve.spread == pytest.approx([10 * 2**0.5] * 2)
    assert curve.costs["upload_bytes"] == (10, 100) and curve.costs["seconds"] == (0, 0)  # 10 + 20 + 30 + 40
    assert over_rounds([]).rounds == () and over_rounds([run(0.5)]).std == (None,)
