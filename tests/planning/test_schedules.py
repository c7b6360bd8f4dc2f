from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.errors import BadInput
from strata.planning.schedules import SCHEDULES, authors, cumulative, equal, paper, paper_equation, until_rounds
from tests.golden import golden
from tests.planning.reference import paper_resnet

ROWS = golden()["schedules"]


def scales_of(name: str) -> list[float]:
    scales = golden()["configs"][name]["s_json"]
    return [scales[0], *scales]


def counted(name: str) -> Callable[[int, int, float], int]:
    """The golden parameter counts as a function: Q(n-1, n, s_n), Q(0, n, s_n) and Q(0, 0, 1)."""
    row, scales = ROWS[name], scales_of(name)

    def parameters(k_frozen: int, k_trained: int, scale: float) -> int:
        if (k_trained, scale) == (0, 1.0):
            return row["submodel_params"][-1]
        assert scale == scales[k_trained]
        if k_trained == 0 or k_frozen == k_trained - 1 > 0:
            return row["trained_params"][k_trained]
        assert k_frozen == 0
        return row["submodel_params"][k_trained - 1]

    return parameters


@pytest.mark.parametrize("name", ROWS)
def test_golden_rows(name: str) -> None:
    row, scales, parameters = ROWS[name], scales_of(name), counted(name)
    assert [round(float(r), 1) for r in cumulative(parameters, scales, 2500)] == row["cumulative"]
    assert [round(float(r), 1) for r in paper_equation(parameters, scales, 2500)] == row["paper_eq"]
    assert authors(parameters, scales, 2500) == row["official"]


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("ResNet")])
def test_golden_rows_with_counted_networks(name: str) -> None:
    network, row, scales = paper_resnet(name.split("@")[0]), ROWS[name], scales_of(name)
    trained = [network.trained_parameters(max(0, n - 1), n, s) for n, s in enumerate(scales)]
    assert trained == row["trained_params"]
    assert [round(float(r), 1) for r in cumulative(network.trained_parameters, scales, 2500)] == row["cumulative"]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "early-stopping"])
@pytest.mark.parametrize("rounds", [1, 2, 17, 500, 2500])
def test_every_schedule_rises_and_ends_at_the_last_round(name: str, schedule: str, rounds: int) -> None:
    ends = until_rounds(schedule, counted(name), scales_of(name), rounds)
    assert list(ends) == sorted(ends) and ends[-1] == rounds
    assert ends[-1] - ends[-2] >= 1  # the last step always trains


def test_paper_is_the_running_maximum() -> None:
    ends = paper(counted("ResNet20@0.125"), scales_of("ResNet20@0.125"), 2500)
    # golden paper_eq falls back at steps 3, 4 and 11: 23.1 23.1 23.0 ... 247.3 242.2
    assert [round(float(r), 1) for r in ends[2:5]] == [23.1, 23.1, 23.1]
    assert round(float(ends[11]), 1) == round(float(ends[10]), 1) == 247.3
    assert ends[-1] == 2500


def test_rounding() -> None:
    # cumulative ResNet20@0.25: [73.9, 79.4, 119.1, ... 1757.9, 2500]
    ends = until_rounds("cumulative", counted("ResNet20@0.25"), scales_of("ResNet20@0.25"), 2500)
    assert ends == (74, 79, 119, 138, 226, 244, 397, 429, 784, 863, 1395, 1758, 2500)


def test_equal() -> None:
    assert equal(lambda *_: 1, [0.5, 0.5, 0.5, 1.0], 10) == [2.5, 5, 7.5, 10]
    assert until_rounds("equal", lambda *_: 1, [0.5, 0.5, 1.0], 9) == (3, 6, 9)


def test_few_rounds_leave_steps_without_any() -> None:
    assert until_rounds("equal", lambda *_: 1, [0.5] * 9 + [1.0], 3) == (0, 1, 1, 1, 2, 2, 2, 2, 2, 3)


def test_whole_model() -> None:
    for schedule in ("cumulative", "paper", "authors", "equal"):
        assert until_rounds(schedule, lambda *_: 7, [1.0], 12) == (12,)


def test_early_stopping_is_open() -> None:
    assert until_rounds("early-stopping", lambda *_: 1, [0.5, 0.5, 1.0], 9) == (None, None, None)


def test_unknown_schedule() -> None:
    with pytest.raises(BadInput, match="unknown schedule 'fast'"):
        until_rounds("fast", lambda *_: 1, [1.0], 9)
