from __future__ import annotations

import pytest

from strata.core.errors import BadInput
from strata.federation.simulated_fleet import SimulatedFleet, parse_stragglers


def test_sampling_is_a_function_of_seed_round_and_attempt() -> None:
    for devices in (12, 100, 100_000, 10**9):
        fleet = SimulatedFleet(seed=1, devices=devices)
        chosen = fleet.sample(3, 0, 10)
        assert chosen == SimulatedFleet(seed=1, devices=devices).sample(3, 0, 10)
        assert len(set(chosen)) == 10 and all(0 <= device < devices for device in chosen)
        assert chosen != fleet.sample(4, 0, 10) and chosen != SimulatedFleet(seed=2, devices=devices).sample(3, 0, 10)


def test_a_second_attempt_asks_others() -> None:
    fleet = SimulatedFleet(seed=0, devices=12)
    first = fleet.sample(0, 0, 5)
    second = fleet.sample(0, 1, 5, asked=first)
    assert not set(first) & set(second) and len(second) == 5
    assert len(fleet.sample(0, 2, 5, asked=[*first, *second])) == 2  # no more than there are


def test_only_usable_devices_are_asked() -> None:
    for devices in (40, 100_000):
        assert all(d % 4 == 0 for d in SimulatedFleet(0, devices).sample(0, 0, 10, usable=lambda d: d % 4 == 0))


def test_every_device_gets_its_turn() -> None:
    fleet = SimulatedFleet(seed=0, devices=20)
    counts = [0] * 20
    for round in range(400):
        for device in fleet.sample(round, 0, 5):
            counts[device] += 1
    assert min(counts) > 70 and max(counts) < 130  # 100 expected, standard deviation 8.7


def test_dropout_and_stragglers_have_their_share() -> None:
    fleet = SimulatedFleet(seed=0, devices=1000, dropout=0.1, straggler_share=0.2, slowdown=3, deadline=2)
    failed = sum(fleet.fails(round, 0, device) for round in range(20) for device in range(100))
    assert 150 < failed < 250
    slow = [device for device in range(1000) if fleet.is_straggler(device)]
    assert 150 < len(slow) < 250
    assert all(fleet.time(0, 0, device) > 2 for device in slow[:50])  # 3 exp(0.1 z) < 2 would need z < -4
    excuses = {fleet.excuse(0, 0, device) for device in range(100)}
    assert None in excuses and "dropped out" in excuses and any("late: took" in e for e in excuses if e)
    assert SimulatedFleet(seed=0, devices=10).excuse(0, 0, 3) is None


def test_bad_settings() -> None:
    assert parse_stragglers("0.2:3") == (0.2, 3.0) and parse_stragglers(None) == (0.0, 1.0)
    for text in ("0.2", "a:b", "1:2:3"):
        with pytest.raises(BadInput, match="SHARE:SLOWDOWN"):
            parse_stragglers(text)
    for wrong in (
        {"devices": 0}, {"dropout": 1.0}, {"straggler_share": 2.0}, {"slowdown": 0.5}, {"deadline": 0.0},
        {"deadline": float("inf")}, {"deadline": float("nan")},
    ):  # fmt: skip
        with pytest.raises(BadInput):
            SimulatedFleet(**{"seed": 0, "devices": 5, **wrong})
