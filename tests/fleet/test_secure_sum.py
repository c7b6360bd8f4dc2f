"""Sums of which the server sees no part: what it learns, what it costs in precision, who is lost, who lies."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest

from strata.core.errors import BadInput
from strata.fleet.device.secure_work import scaled
from strata.fleet.protocol.codec import Malformed
from strata.fleet.protocol.secure_sum import (
    TARGET,
    Collector,
    Member,
    SumFailed,
    error_bound,
    mask_of,
    quantised,
    step_of,
    threshold_of,
)

Change = Callable[[int, str, dict[str, Any]], dict[str, Any]]


class Fleet:
    """Devices with values each, and a server that writes down all that it receives."""

    def __init__(self, values: Mapping[int, np.ndarray], clip: float = 1.0, fewest: int = 3) -> None:
        length = len(next(iter(values.values())))
        self.values, self.clip = values, clip
        self.server = Collector(fewest, length, clip)
        self.members = {number: Member.begin(number) for number in values}
        self.seen: list[str] = []
        self.private: list[str] = []  # what must never be in it

    def play(self, killed: Mapping[str, Collection[int]] | None = None, change: Change | None = None) -> np.ndarray:
        """`killed`: at which stage; `change`: what a device sends instead. Who sends what is malformed is out."""
        there, server = list(self.members), self.server

        def heard(stage: str, say: Callable[[Member], dict[str, Any]]) -> None:
            for number in list(there):
                if number in (killed or {}).get(stage, ()):
                    there.remove(number)
                    continue
                self.members[number] = member = Member.from_json(json.loads(json.dumps(self.members[number].to_json())))
                said = say(member)
                self.private += [
                    base64.b64encode(secret).decode() for secret in (*member.secrets, member.seed) if secret
                ]
                said = json.loads(json.dumps(change(number, stage, said) if change else said))
                self.seen.append(json.dumps(said))
                try:
                    getattr(server, f"take_{stage}")(number, said)
                except Malformed:
                    there.remove(number)

        heard("keys", lambda member: member.keys())
        assert server.begins
        asked = server.for_shares()
        heard("shares", lambda member: member.share(asked))
        assert server.goes_on
        for number in list(there):
            if number in (killed or {}).get("masked", ()):
                there.remove(number)
                continue
            member = self.members[number]
            wrong = member.receive(server.for_masked(number))
            made = member.mask(quantised(self.values[number], self.clip, number))
            if change:
                made = np.array(change(number, "masked", {"values": made})["values"])
            try:
                server.take_masked(number, made, wrong)
            except Malformed:
                there.remove(number)
        assert server.can_end
        asked = server.for_reveal()
        heard("reveal", lambda member: member.reveal(asked))
        return server.total()


def some_values(devices: int = 5, length: int = 300, largest: float = 0.9) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(7)
    return {number: draw.uniform(-largest, largest, length) for number in range(devices)}


def test_the_mask_is_aes_in_counter_mode() -> None:
    known = bytes.fromhex("dc95c078a2408989ad48a21492842087")  # AES-256 of a block of zeros under a key of zeros
    assert mask_of(bytes(32), 4).tobytes() == known


def test_the_sum_is_right_within_its_steps() -> None:
    values = some_values()
    fleet = Fleet(values)
    total = fleet.play()
    assert step_of(1.0) == 2.0**-21  # twice the clip over 2^22 steps
    assert np.abs(total - sum(values.values())).max() < error_bound(5, 1.0) == 5 * 2.0**-21
    exact = Fleet({number: np.array([0.5, -0.25, 0.0, 7.0]) for number in range(4)}).play()
    assert exact.tolist() == [2.0, -1.0, 0.0, 4.0]  # whole steps, and no value above the clip


def test_rounding_is_right_on_average_and_repeats() -> None:
    value = np.full(20_000, 0.3 * step_of(1.0))
    steps = quantised(value, 1.0, seed=3).astype(np.int64) - TARGET // 2
    assert set(steps.tolist()) == {0, 1} and abs(steps.mean() - 0.3) < 0.01
    assert (quantised(value, 1.0, seed=3) == quantised(value, 1.0, seed=3)).all()


def test_what_the_server_receives_says_nothing_of_an_update() -> None:
    """Every byte of what is masked is uniform and uncorrelated to the values, whatever these are; also after the
    device's own mask has been taken off, as the server can once the sum is made."""
    length = 1 << 15
    for value in (0.0, 1.0):
        values = {number: np.full(length, value) for number in range(3)}
        values[1] = np.linspace(-1, 1, length)
        fleet = Fleet(values)
        fleet.play()
        server = fleet.server
        seed = server._secret(1, 0, {})
        assert seed is not None
        for seen in (server.masked[1], server.masked[1] - mask_of(seed, length)):
            counts = np.bincount(seen.view(np.uint8), minlength=256)
            expected = 4 * length / 256
            assert ((counts - expected) ** 2 / expected).sum() < 400  # chi square of 255 degrees: 255 ± 23
            assert abs(np.corrcoef(seen.astype(float), values[1])[0, 1]) < 0.03
        assert not any(secret in text for secret in fleet.private for text in fleet.seen)
        assert server.total() == pytest.approx(sum(values.values()), abs=error_bound(3, 1.0))


def test_equal_updates_are_masked_differently_each_time() -> None:
    values = {number: np.zeros(64) for number in range(3)}
    one, other = Fleet(values), Fleet(values)
    one.play(), other.play()
    masked = [fleet.server.masked[number] for fleet in (one, other) for number in range(3)]
    assert len({array.tobytes() for array in masked}) == 6


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "reveal"])
def test_devices_that_are_lost_at_any_stage(stage: str) -> None:
    values = some_values(7)
    total = Fleet(values).play(killed={stage: (0, 4)})
    in_sum = [1, 2, 3, 5, 6] if stage != "reveal" else range(7)  # who has sent what is masked is in the sum
    assert np.abs(total - sum(values[number] for number in in_sum)).max() < error_bound(7, 1.0)


def test_devices_lost_at_every_stage_together() -> None:
    values = some_values(9)
    total = Fleet(values).play(killed={"keys": (0,), "shares": (1,), "masked": (2,), "reveal": (4,)})
    assert np.abs(total - sum(values[number] for number in range(3, 9))).max() < error_bound(9, 1.0)


def test_with_too_few_left_nothing_is_learnt() -> None:
    assert [threshold_of(devices, 3) for devices in (3, 5, 6, 20)] == [3, 3, 4, 11]
    fleet = Fleet(some_values(5))
    with pytest.raises(SumFailed, match="2 of the 3 devices"):
        fleet.play(killed={"reveal": (0, 1, 2)})
    for stage, enough in (("keys", "begins"), ("shares", "goes_on"), ("masked", "can_end")):
        fleet = Fleet(some_values(5))
        with pytest.raises(AssertionError):
            fleet.play(killed={stage: (0, 1, 2)})
        assert not getattr(fleet.server, enough)


# --- devices that lie ---------------------------------------------------------------------------------------------


def lying(who: int, at: str, how: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    return lambda number, stage, said: how(said) if (number, stage) == (who, at) else said


RUBBISH: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("keys", lambda said: {}),
    ("keys", lambda said: {"keys": said["keys"][:1] * 2}),
    ("keys", lambda said: {"keys": ["no key", "nor this"]}),
    ("keys", lambda said: {"keys": [[], {}]}),
    ("shares", lambda said: {}),
    ("shares", lambda said: {**said, "shares": {"0": "x", "99": "y"}}),
    ("shares", lambda said: {**said, "digests": dict.fromkeys(said["digests"], ["a", "b"])}),
    ("shares", lambda said: {**said, "seed": 3}),
    ("shares", lambda said: {**said, "shares": dict.fromkeys(said["shares"], "x" * 100_000)}),
    ("masked", lambda said: {"values": said["values"][:-1]}),
    ("masked", lambda said: {"values": said["values"].astype(np.int64)}),
]


@pytest.mark.parametrize(("stage", "how"), RUBBISH)
def test_rubbish_costs_its_own_update(stage: str, how: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    values = some_values(5)
    total = Fleet(values).play(change=lying(2, stage, how))
    assert np.abs(total - sum(values[number] for number in (0, 1, 3, 4))).max() < error_bound(5, 1.0)


def other_shares(said: dict[str, Any]) -> dict[str, Any]:
    wrong = {owner: base64.b64encode(b"\1\0\0\0" + bytes(48)).decode() for owner in said["seeds"]}
    return {**said, "seeds": wrong}


@pytest.mark.parametrize(
    "how",
    [lambda said: {}, lambda said: {"seeds": {"0": 1}, "keys": {}}, lambda said: {"seeds": {"9": "AA=="}, "keys": {}}],
)
def test_rubbish_in_place_of_shares_costs_nothing(how: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    values = some_values(5)
    total = Fleet(values).play(change=lying(2, "reveal", how))
    assert np.abs(total - sum(values.values())).max() < error_bound(5, 1.0)


def test_who_lies_in_its_shares_is_known() -> None:
    values = some_values(5)
    fleet = Fleet(values)
    total = fleet.play(change=lying(2, "reveal", other_shares))
    assert np.abs(total - sum(values.values())).max() < error_bound(5, 1.0)
    assert fleet.server.lied == {2: "revealed another share than it was dealt"}


def test_who_deals_shares_of_another_secret_is_known() -> None:
    fleet = Fleet(some_values(5))
    with pytest.raises(SumFailed) as failed:
        fleet.play(change=lying(2, "shares", lambda said: {**said, "seed": "0" * 64}))
    assert failed.value.liars == {2: "dealt shares of another secret than it uses"}


def test_shares_that_nobody_can_open() -> None:
    """Those that got them say so; if most did, there is no sum, and who dealt them is among the suspects."""
    fleet = Fleet(some_values(5))
    with pytest.raises(SumFailed) as failed:
        fleet.play(change=lying(2, "shares", lambda said: {**said, "shares": dict.fromkeys(said["shares"], "rubbish")}))
    assert fleet.server.complaints == {0: [2], 1: [2], 2: [], 3: [2], 4: [2]}
    assert 2 in failed.value.suspects and not failed.value.liars
    values = some_values(5)
    total = Fleet(values).play(
        change=lying(2, "shares", lambda said: {**said, "shares": {**said["shares"], "4": "rubbish"}})
    )
    assert np.abs(total - sum(values.values())).max() < error_bound(5, 1.0)


def test_values_that_no_device_can_have_are_noticed() -> None:
    """What a device adds beyond the steps shows in the sum; not whose it was."""
    fleet = Fleet(some_values(5))
    draw = np.random.default_rng(1)
    with pytest.raises(SumFailed, match="values of its own") as failed:
        fleet.play(
            change=lying(3, "masked", lambda said: {"values": draw.integers(0, 2**32, len(said["values"]), np.uint32)})
        )
    assert failed.value.suspects == [0, 1, 2, 3, 4] and not failed.value.liars


def test_a_lie_within_the_range_is_bounded_by_the_clip() -> None:
    """Whatever one device sends, no coordinate of the mean changes by more than the clip, or there is no sum."""
    values, clip = some_values(5, largest=0.01), 0.05
    fleet = Fleet(values, clip)
    total = fleet.play(change=lying(3, "masked", lambda said: {"values": said["values"] + np.uint32(TARGET // 4)}))
    assert np.abs(total / 5).max() <= clip
    assert np.abs(total - sum(values.values()) - clip / 2).max() < error_bound(5, clip)


def test_another_devices_key_is_refused() -> None:
    collector, member = Collector(3, 1, 1.0), Member.begin(0)
    collector.take_keys(0, member.keys())
    with pytest.raises(Malformed, match="another device's public key"):
        collector.take_keys(1, {"keys": [Member.begin(1).keys()["keys"][0], member.keys()["keys"][1]]})


# --- a server that asks for too much ------------------------------------------------------------------------------


def dealt(devices: int = 5) -> Fleet:
    fleet = Fleet(some_values(devices))
    for number, member in fleet.members.items():
        fleet.server.take_keys(number, member.keys())
    return fleet


@pytest.mark.parametrize(("devices", "threshold"), [(2, 2), (5, 2), (6, 3), (5, 6), (5, True)])
def test_a_device_takes_no_part_in_sums_over_too_few(devices: int, threshold: int) -> None:
    fleet = dealt(devices)
    asked = {**fleet.server.for_shares(), "threshold": threshold}
    with pytest.raises(BadInput, match="takes part in sums over at least 3"):
        fleet.members[0].share(asked)


def test_a_device_can_ask_for_more_company() -> None:
    fleet = dealt(5)
    member = Member.begin(0, fewest=6)
    with pytest.raises(BadInput, match="at least 6"):
        member.share(
            {**fleet.server.for_shares(), "keys": {**fleet.server.for_shares()["keys"], "0": member.keys()["keys"]}}
        )


def test_a_device_gives_both_secrets_of_nobody() -> None:
    fleet = dealt()
    asked = fleet.server.for_shares()
    with pytest.raises(BadInput, match="own keys"):
        fleet.members[0].share({**asked, "keys": {**asked["keys"], "0": Member.begin(0).keys()["keys"]}})
    with pytest.raises(BadInput, match="one public key for two"):
        fleet.members[0].share({**asked, "keys": {**asked["keys"], "1": asked["keys"]["2"]}})
    for number, member in fleet.members.items():
        fleet.server.take_shares(number, member.share(asked))
    member = fleet.members[0]
    told = fleet.server.for_masked(0)
    with pytest.raises(BadInput, match="2 are left, fewer than 3"):
        member.receive({key: {"1": told[key]["1"]} for key in told})
    with pytest.raises(BadInput, match="not in the sum"):
        member.receive({key: {**told[key], "9": told[key]["1"]} for key in told})
    member.receive(told)
    with pytest.raises(BadInput, match="out of turn"):
        member.reveal({"active": [0, 1, 2], "dead": [3, 4]})
    member.mask(np.zeros(300, np.uint32))
    with pytest.raises(BadInput, match="out of turn"):
        member.mask(np.ones(300, np.uint32))  # the same masks twice would give the difference away
    for active, dead in (([0, 1, 2, 3], [3, 4]), ([1, 2, 3], [0]), ([0, 1, 2, 9], [])):
        with pytest.raises(BadInput, match="both secrets of a device"):
            member.reveal({"active": active, "dead": dead})
    with pytest.raises(BadInput, match="over 2 devices, fewer than 3"):
        member.reveal({"active": [0, 1], "dead": [2, 3, 4]})
    member.reveal({"active": [0, 1, 2], "dead": [3, 4]})
    with pytest.raises(BadInput, match="out of turn"):
        member.reveal({"active": [0, 1, 2, 3], "dead": [4]})


def test_a_clipped_change_stays_clipped_when_rounded() -> None:
    """Differential privacy counts on it: the norm of what is summed, not of what was meant."""
    clip = 1e-3
    values = np.random.default_rng(0).normal(size=200_000)
    short = scaled(values, clip, clip)
    rounded = quantised(short, clip, 1).astype(float) * step_of(clip) - clip
    assert 0.99 * clip < np.linalg.norm(rounded) <= clip
    assert (scaled(values * 1e-9, clip, clip) == values * 1e-9).all()
