from __future__ import annotations

from itertools import permutations

import pytest
import torch

from strata.core.errors import BadInput
from strata.engines import Outcome
from strata.federation.aggregation import RunningMean, ServerOptimizer, in_order
from tests.federation.fakes import RowCut

STATE = {"a": torch.tensor([10.0, 20.0, 30.0]), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
NONE = ServerOptimizer()


def test_the_mean_is_over_those_who_trained_a_coordinate_and_others_keep_the_servers_value() -> None:
    mean = RunningMean(STATE)
    mean.add(RowCut.of(STATE, {"a": (0, 1)}), {"a": torch.tensor([1.0, 2.0])})
    mean.add(RowCut.of(STATE, {"a": (1,)}), {"a": torch.tensor([6.0])})
    state, slots = NONE.apply(STATE, {}, mean)
    assert state["a"].tolist() == [1.0, 4.0, 30.0]
    assert state["b"] is STATE["b"] and slots == {}
    assert STATE["a"].tolist() == [10.0, 20.0, 30.0]
    assert mean.updates == 2 and set(mean.sums) == {"a"}  # no memory for what nobody trained


def test_weighted_by_samples() -> None:
    mean = RunningMean(STATE)
    mean.add(RowCut.of(STATE, {"a": (0, 1)}), {"a": torch.tensor([1.0, 2.0])}, weight=3)
    mean.add(RowCut.of(STATE, {"a": (1,)}), {"a": torch.tensor([6.0])}, weight=1)
    assert NONE.apply(STATE, {}, mean)[0]["a"].tolist() == [1.0, 3.0, 30.0]  # (3*2 + 1*6) / 4


def test_equal_values_stay_equal_to_the_bit() -> None:
    cut, value = RowCut.of(STATE, {}), torch.tensor([0.1, 1 / 3, 1e-30])
    for count in (3, 7, 10):
        mean = RunningMean(STATE)
        for _ in range(count):
            mean.add(cut, {"a": value})
        assert torch.equal(NONE.apply(STATE, {}, mean)[0]["a"], value)


def test_any_order_of_arrival_gives_job_order() -> None:
    for order in permutations(range(4)):
        assert [o.index for o in in_order(Outcome(i) for i in order)] == [0, 1, 2, 3]


def test_only_outcomes_ahead_of_their_turn_are_held_back() -> None:
    taken: list[int] = []

    def outcomes():
        for index in (0, 2, 1, 3):
            taken.append(index)
            yield Outcome(index)

    ordered = in_order(outcomes())
    assert next(ordered).index == 0 and taken == [0]
    assert next(ordered).index == 1 and taken == [0, 2, 1]


def one(value: list[float], rows: tuple[int, ...] = (0, 1)) -> RunningMean:
    mean = RunningMean(STATE)
    mean.add(RowCut.of(STATE, {"a": rows}), {"a": torch.tensor(value)})
    return mean


def test_server_momentum_by_hand() -> None:
    optimizer = ServerOptimizer("momentum", lr=0.5, beta1=0.5)
    state, slots = optimizer.apply(STATE, {}, one([12.0, 20.0]))  # d = 2, 0
    assert state["a"].tolist() == [11.0, 20.0, 30.0]
    assert slots["first/a"].tolist() == [2.0, 0.0, 0.0]
    state, slots = optimizer.apply(state, slots, one([13.0], (0,)))  # d = 2, v = 0.5 * 2 + 2 = 3
    assert state["a"].tolist() == [12.5, 20.0, 30.0]
    state, slots = optimizer.apply(state, slots, one([20.0], (1,)))  # coordinate 0 rests: value and slot stay
    assert state["a"].tolist() == [12.5, 20.0, 30.0] and slots["first/a"].tolist() == [3.0, 0.0, 0.0]


def test_server_adam_by_hand() -> None:
    optimizer = ServerOptimizer("adam", lr=0.1, beta1=0.9, beta2=0.99, tau=0.1)
    state, slots = optimizer.apply(STATE, {}, one([12.0, 20.0]))
    # d = 2: m = 0.2, v = 0.04, step = 0.1 * 0.2 / (0.2 + 0.1)
    torch.testing.assert_close(state["a"], torch.tensor([10 + 0.02 / 0.3, 20.0, 30.0]))
    torch.testing.assert_close(slots["first/a"], torch.tensor([0.2, 0.0, 0.0]))
    torch.testing.assert_close(slots["second/a"], torch.tensor([0.04, 0.0, 0.0]))


def test_a_server_learning_rate_without_momentum() -> None:
    assert ServerOptimizer(lr=0.5).apply(STATE, {}, one([12.0, 20.0]))[0]["a"].tolist() == [11.0, 20.0, 30.0]


@pytest.mark.parametrize("wrong", [{"kind": "sgd"}, {"lr": 0.0}, {"beta1": 1.0}, {"tau": 0.0}, {"lr": float("nan")}])
def test_bad_settings(wrong: dict) -> None:
    with pytest.raises(BadInput):
        ServerOptimizer(**wrong)
