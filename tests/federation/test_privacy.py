"""Clipping, noise, sampling: by hand and by statistics. What they add up to: test_accounting.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from strata.core.errors import BadInput
from strata.federation.aggregation import ServerOptimizer
from strata.federation.privacy import MOST_CUTS, Privacy, PrivateSum, Reach
from strata.federation.simulated_fleet import SimulatedFleet
from strata.methods import create
from strata.runs.config import RunOptions
from tests.federation import tiny
from tests.federation.fakes import RowCut
from tests.federation.test_rounds import Lying, nan, one_round, start

STATE = {"a": torch.tensor([10.0, 20.0, 30.0, 40.0]), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
NARROW = RowCut.of(STATE, {"a": (0, 1)}, frozen=("b",))
WIDE = RowCut.of(STATE, {"a": (0, 1, 2)}, frozen=("b",))
FLEET = Reach({NARROW: 4, WIDE: 2})  # six devices; nobody has row 3 of a, nor b
PRIVACY = Privacy(noise=1.5, clip=2.0, delta=1e-3, seed=7)


def private_sum(per_round: int = 3, privacy: Privacy = PRIVACY, round: int = 0) -> PrivateSum:
    return PrivateSum(STATE, FLEET, privacy, per_round / 6, round)


def test_a_change_is_scaled_down_to_the_clip_as_a_whole() -> None:
    total = private_sum()
    total.add(NARROW, {"a": torch.tensor([13.0, 24.0])})  # changed by 3, 4: norm 5, so times 2/5
    assert total.sums["a"].tolist() == pytest.approx([1.2, 1.6, 0, 0])
    total.add(WIDE, {"a": torch.tensor([10.0, 20.5, 30.0])})  # norm 0.5: as it is
    assert total.sums["a"].tolist() == pytest.approx([1.2, 2.1, 0, 0])
    total.add(WIDE, {"a": torch.tensor([10.0, 20.0, 30.0])})  # no change at all
    assert total.sums["a"].tolist() == pytest.approx([1.2, 2.1, 0, 0])
    assert list(total.sums) == ["a"] and total.updates == 3


def test_the_clip_is_of_all_tensors_together() -> None:
    full = RowCut.of(STATE, {})
    total = PrivateSum(STATE, Reach({full: 1}), PRIVACY, 1, 0)
    total.add(
        full, {"a": STATE["a"] + torch.tensor([8.0, 0, 0, 0]), "b": STATE["b"] + torch.tensor([[0, 6.0], [0, 0]])}
    )
    assert total.sums["a"].tolist() == pytest.approx([1.6, 0, 0, 0])  # norm 10, so times 2/10
    assert total.sums["b"].flatten().tolist() == pytest.approx([0, 1.2, 0, 0])


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_noise_and_denominator_do_not_depend_on_who_answered(answers: int) -> None:
    total = private_sum(per_round=3)  # a chance of 3/6 each
    for _ in range(answers):
        total.add(NARROW, {"a": torch.tensor([11.0, 20.0])})
    state, _ = ServerOptimizer().apply(STATE, {}, total)
    noise = PRIVACY.gaussian((4,), 0, 0)
    # rows 0 and 1: six devices have them, three are expected; row 2: two have it, one is expected; row 3: none
    expected = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64)
    expected[0] += (answers + noise[0]) / 3
    expected[1] += noise[1] / 3
    expected[2] += noise[2] / 1
    assert torch.equal(state["a"], expected.float()) and state["a"][3] == 40.0
    assert state["b"] is STATE["b"] and list(total.changed) == ["a"]


def test_where_less_than_one_device_is_expected_the_denominator_is_one() -> None:
    total = private_sum(per_round=1)
    total.add(WIDE, {"a": torch.tensor([10.0, 20.0, 31.0])})
    state, _ = ServerOptimizer().apply(STATE, {}, total)
    noise = PRIVACY.gaussian((4,), 0, 0)
    assert state["a"][2].item() == pytest.approx(31.0 + noise[2].item(), rel=1e-6)
    assert state["a"][0].item() == pytest.approx(10.0 + noise[0].item(), rel=1e-6)  # 6 devices at 1/6: one


def test_the_server_optimizer_works_on_what_is_released() -> None:
    total = private_sum()
    state, slots = ServerOptimizer("momentum", lr=0.5, beta1=0.5).apply(STATE, {}, total)
    step = PRIVACY.gaussian((4,), 0, 0)[0].item() / 3
    assert slots["first/a"][0].item() == pytest.approx(step, rel=1e-4) and slots["first/a"][3] == 0
    assert state["a"][0].item() == pytest.approx(10 + 0.5 * step, rel=1e-5)


def test_it_is_released_once_and_only_for_cuts_that_were_foreseen() -> None:
    total = private_sum()
    list(total.means())
    with pytest.raises(RuntimeError, match="released once"):
        list(total.means())
    with pytest.raises(RuntimeError, match="did not foresee"):
        private_sum().add(RowCut.of(STATE, {"a": (3,)}, frozen=("b",)), {"a": torch.tensor([1.0])})


def test_a_change_too_large_for_numbers_counts_for_nothing() -> None:
    state = {"a": torch.tensor([-1e308, 0.0], dtype=torch.float64)}
    cut = RowCut.of(state, {})
    for lie in ([1e308, 0.0], [-1e308, 1e200]):
        total = PrivateSum(state, Reach({cut: 1}), PRIVACY, 1.0, 0)
        total.add(cut, {"a": torch.tensor(lie, dtype=torch.float64)})
        assert total.sums["a"].tolist() == [0.0, 0.0] and total.updates == 1


ROWS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    updates=st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=6), clip=st.floats(1e-3, 1e3), data=st.data()
)
def test_one_device_more_or_less_moves_the_sum_by_at_most_the_clip(updates: Any, clip: float, data: Any) -> None:
    gone = data.draw(st.integers(0, len(updates) - 1))
    sums = []
    for left_out in (None, gone):
        total = private_sum(privacy=Privacy(1.0, clip, 1e-3))
        for number, (values, narrow) in enumerate(updates):
            if number != left_out:
                kept = values[:2] if narrow else values
                total.add(NARROW if narrow else WIDE, {"a": torch.tensor(kept)})
        sums.append(total.sums["a"])
    assert float((sums[0] - sums[1]).norm()) <= clip * (1 + 1e-9)


# --- randomness ----------------------------------------------------------------------------------------------------


def test_the_noise_is_gaussian_of_the_right_width() -> None:
    count = 200_000
    for privacy, sure in ((PRIVACY, 4), (Privacy(1.5, 2.0, 1e-3), 6)):  # of the operating system: never by chance
        noise = privacy.gaussian((count,), 0, 0)
        assert noise.dtype == torch.float64 and torch.isfinite(noise).all()
        assert abs(float(noise.mean())) < sure * 3.0 / math.sqrt(count)
        assert abs(float(noise.std()) - 3.0) < sure * 3.0 / math.sqrt(2 * count)
    assert kstest(PRIVACY.gaussian((count,), 0, 0).numpy() / 3.0, "norm").pvalue > 0.01


def test_noise_is_never_the_same_twice_unless_a_seed_says_so() -> None:
    secret = Privacy(1.0, 1.0, 1e-3)
    assert not torch.equal(secret.gaussian((4,), 0, 0), secret.gaussian((4,), 0, 0))
    draws = [PRIVACY.gaussian((4,), round, tensor) for round in range(3) for tensor in range(3)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 9
    assert torch.equal(PRIVACY.gaussian((4,), 1, 2), draws[5])


def test_each_device_is_sampled_for_itself() -> None:
    fleet, rounds, rate = SimulatedFleet(0, 50), 400, 0.2
    chosen = [fleet.sample_each(PRIVACY.uniform(50, "sampling", round), rate) for round in range(rounds)]
    times = np.bincount([device for devices in chosen for device in devices], minlength=50)
    assert np.abs(times - 80).max() < 4.5 * math.sqrt(rounds * rate * (1 - rate))
    sizes = np.array([len(devices) for devices in chosen])  # binomial: mean 10, variance 8
    assert abs(sizes.mean() - 10) < 4 * math.sqrt(8 / rounds) and 6 < sizes.var() < 10.5
    pairs = sum({0, 1} <= set(devices) for devices in chosen)  # together as often as independence has it: 16
    assert abs(pairs - 16) < 4 * 4
    assert fleet.sample_each(np.full(50, 0.5), 1.0, lambda device: device % 2 == 0) == list(range(0, 50, 2))
    assert fleet.sample_each(np.full(50, 0.5), 0.5) == []


# --- which coordinates a round may touch -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "small", "heterofl", "fjord", "fedrolex", "fd", "slt"])
def test_the_reach_of_every_method_counts_all_devices(name: str) -> None:
    """The short cut by periods gives what asking for each device's cut does."""
    levels = (1.0, 0.5)
    method = tiny.method("slt") if name == "slt" else create(name, tiny.graph(), constraints=levels, **(
        {"seed": 0} if name == "fd" else {}))  # fmt: skip
    for round in (0, 3):
        reach, expected = Reach.of(method, round, 7), {}
        for device in filter(method.can_train, range(7)):
            cut = method.cut_for(round, device)
            expected[cut] = expected.get(cut, 0) + 1
        assert reach.cuts == expected and sum(reach.cuts.values()) == (4 if name == "fedavg" else 7)


def test_own_cuts_for_very_many_devices_are_refused() -> None:
    own, shared = (create("fd", tiny.graph(), constraints=(0.5,), seed=0, variant=v) for v in ("device", "shared"))
    with pytest.raises(BadInput, match="gives each device its own"):
        Reach.of(own, 0, MOST_CUTS + 1)
    assert list(Reach.of(shared, 0, 10**9).cuts.values()) == [10**9]


@pytest.mark.parametrize("name", ["fd", "fedavg"])
def test_a_round_changes_every_coordinate_it_might_and_no_other(name: str) -> None:
    before = start()
    after, record, _ = one_round(Lying(), name, state=before, privacy=PRIVACY)
    assert record["train_loss"] is None
    reach = Reach.of(tiny.method(name, 1.0 if name == "fedavg" else 0.5), 0, 12)
    for key, tensor in before.tensors.items():
        may = torch.zeros_like(tensor, dtype=torch.bool)
        for cut in reach.cuts:
            if key in cut.trained:
                cut.scatter({key: may}, {key: torch.ones(cut.shapes[key], dtype=torch.bool)})
        assert torch.equal(after.tensors[key] != tensor, may), key


def test_a_round_in_which_nobody_answers_is_noise_and_is_not_redone() -> None:
    engine = Lying(dict.fromkeys(range(12), nan))
    after, record, _ = one_round(engine, privacy=PRIVACY, per_round=6)
    assert len(record["dropped"]) == len(record["devices"]) == len(engine.asked) > 0
    noise = PRIVACY.gaussian((4, 3, 3, 3), 0, 0)
    torch.testing.assert_close(after.tensors["conv1.weight"].double(), start().tensors["conv1.weight"] + noise / 6)
    nobody, record, _ = one_round(Lying(), privacy=Privacy(1.0, 1.0, 1e-3, seed=_lonely()), per_round=1)
    assert record["devices"] == [] and record["upload_bytes"] == 0 and record["train_loss"] is None
    assert not torch.equal(nobody.tensors["conv1.weight"], start().tensors["conv1.weight"])


def _lonely() -> int:
    """A seed with which no device is sampled in round 0."""
    draws = ((seed, Privacy(1.0, 1.0, 1e-3, seed).uniform(12, "sampling", 0)) for seed in range(100))
    return next(seed for seed, draw in draws if (draw >= 1 / 12).all())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dp_noise": 1.0}, "needs both: dp_noise .* and dp_clip"),
        ({"dp_clip": 1.0}, "needs both"),
        ({"dp_delta": 1e-3}, "belong to differential privacy"),
        ({"dp_seed": 1}, "belong to differential privacy"),
        ({"dp_noise": 0.0, "dp_clip": 1.0}, "0.1 to 10000 times the clip"),
        ({"dp_noise": math.inf, "dp_clip": 1.0}, "0.1 to 10000 times the clip"),
        ({"dp_noise": 1.0, "dp_clip": 0.0}, r"above 0 and at most 1e\+18, not 0"),
        ({"dp_noise": 1.0, "dp_clip": 1.0, "dp_delta": 1.0}, "delta is a chance"),
        ({"dp_noise": 1.0, "dp_clip": 1.0, "dp_seed": -1}, "seed of the noise"),
        ({"dp_noise": 1.0, "dp_clip": 1.0, "weighted": True}, "private: leave out weighted"),
        ({"dp_noise": 1.0, "dp_clip": 1.0, "aggregation": "median"}, "leave one of them out"),
        ({"dp_noise": 1.0, "dp_clip": 1.0, "quorum": 2}, "never redone: leave out the quorum"),
    ],
)
def test_settings_that_do_not_go_together(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        RunOptions.of(**wrong)


def test_delta_is_by_default_below_one_in_the_number_of_devices() -> None:
    privacy = RunOptions.of(devices=1000, dp_noise=1.0, dp_clip=1.0).private
    assert privacy is not None and privacy.delta == pytest.approx(1000**-1.1) and privacy.seed is None
