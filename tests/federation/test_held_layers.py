from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.federation.held_layers import Holdings
from tests.federation.fakes import RowCut

STATE = {"one": torch.zeros(4), "two": torch.zeros(10), "head": torch.zeros(100)}
VALUE_BYTES = dict.fromkeys(STATE, 4)
ALL = RowCut.of(STATE, {})
FIRST_FROZEN = RowCut.of(STATE, {}, frozen=("one",))
BOTH_FROZEN = RowCut.of(STATE, {}, frozen=("one", "two"))


def test_frozen_layers_are_sent_once() -> None:
    held = Holdings()
    assert held.download_bytes(5, ALL, VALUE_BYTES) == 4 * 114
    held = held.after(0, {5: FIRST_FROZEN}, changed=("two", "head"))
    assert held.download_bytes(5, FIRST_FROZEN, VALUE_BYTES) == 4 * 110
    assert held.download_bytes(6, FIRST_FROZEN, VALUE_BYTES) == 4 * 114  # another device
    assert held.download_bytes(5, BOTH_FROZEN, VALUE_BYTES) == 4 * 110  # layer two was trained there, then averaged
    held = held.after(1, {5: BOTH_FROZEN}, changed=("head",))
    assert held.download_bytes(5, BOTH_FROZEN, VALUE_BYTES) == 4 * 100


def test_a_value_travels_in_the_bytes_it_has() -> None:
    assert Holdings().download_bytes(5, ALL, {"one": 8, "two": 4, "head": 2}) == 8 * 4 + 4 * 10 + 2 * 100


def test_what_others_changed_since_is_sent_again() -> None:
    held = Holdings().after(3, {5: FIRST_FROZEN}, changed=("two", "head", "one"))  # a strong device trained layer one
    assert held.download_bytes(5, FIRST_FROZEN, VALUE_BYTES) == 4 * 114
    held = held.after(4, {5: FIRST_FROZEN}, changed=("two", "head")).after(5, {}, changed=("one",))
    assert held.download_bytes(5, FIRST_FROZEN, VALUE_BYTES) == 4 * 114


def test_other_kept_indices_are_another_layer() -> None:
    held = Holdings().after(0, {5: RowCut.of(STATE, {"one": (0, 1)}, frozen=("one",))}, changed=())
    assert held.download_bytes(5, RowCut.of(STATE, {"one": (0, 2)}, frozen=("one",)), VALUE_BYTES) == 4 * 112
    assert held.download_bytes(5, RowCut.of(STATE, {"one": (0, 1)}, frozen=("one",)), VALUE_BYTES) == 4 * 110


def test_a_device_without_frozen_layers_costs_no_memory_and_many_cost_14_bytes() -> None:
    held = Holdings().after(0, {1: FIRST_FROZEN}, ()).after(1, {1: ALL, 2: ALL}, ())
    assert len(held.devices) == 0
    for round in range(50):
        held = held.after(round, {device * 97 % 1000: FIRST_FROZEN for device in range(round, round + 10)}, ("head",))
    assert np.array_equal(held.devices, np.unique(held.devices))
    assert sum(array.nbytes for array in held.arrays().values()) == 14 * len(held.devices) and len(held.known_sets) == 1
    again = Holdings.load(held.arrays(), held.to_json())
    assert (
        again.download_bytes(97, FIRST_FROZEN, VALUE_BYTES)
        == held.download_bytes(97, FIRST_FROZEN, VALUE_BYTES)
        == 4 * 110
    )


def test_sets_without_end_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.federation.held_layers.MOST_SETS", 2)
    held = Holdings()
    for device, kept in enumerate(((0,), (1,), (2,), (0,))):
        held = held.after(0, {device: RowCut.of(STATE, {"one": kept}, frozen=("one",))}, changed=())
    assert held.devices.tolist() == [0, 1, 3] and held.sets.tolist() == [0, 1, 0]
    assert held.after(1, {0: RowCut.of(STATE, {"one": (2,)}, frozen=("one",))}, ()).devices.tolist() == [1, 3]
