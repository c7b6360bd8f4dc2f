from __future__ import annotations

import math
import statistics
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.federation import robust
from strata.federation.aggregation import ServerOptimizer
from strata.federation.robust import KeptUpdates, Robust, parse_aggregation
from strata.runs.config import RunOptions
from tests.federation import tiny
from tests.federation.fakes import RowCut
from tests.federation.test_rounds import Lying, nan, one_round, same

STATE = {"a": torch.tensor([10.0, 20.0, 30.0]), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
MEDIAN = Robust()
FIFTH = Robust(Fraction(1, 5))


def of(rule: Robust, *updates: tuple[tuple[int, ...], list[float]]) -> list[float]:
    """The server's `a` after devices sent these rows of it."""
    kept = KeptUpdates(STATE, rule)
    for rows, values in updates:
        kept.add(RowCut.of(STATE, {"a": rows}), {"a": torch.tensor(values)})
    state, slots = ServerOptimizer().apply(STATE, {}, kept)
    assert state["b"] is STATE["b"] and slots == {} and kept.updates == len(updates)
    return state["a"].tolist()


def test_the_median_is_over_those_who_trained_a_coordinate() -> None:
    # coordinate 0: 1, 2, 9 -> 2; coordinate 1: 5, 4 -> 4.5; coordinate 2: nobody
    assert of(MEDIAN, ((0, 1), [1.0, 5.0]), ((0,), [9.0]), ((0, 1), [2.0, 4.0])) == [2.0, 4.5, 30.0]
    assert of(MEDIAN, ((1,), [7.0])) == [10.0, 7.0, 30.0]


def test_one_liar_with_huge_values_does_not_move_the_median() -> None:
    honest = [((0, 1, 2), [1.0, 1.1, 1.2]), ((0, 1, 2), [2.0, 2.1, 2.2]), ((0, 1, 2), [3.0, 3.1, 3.2])]
    for lie in (3e38, -3e38):
        found = torch.tensor(of(MEDIAN, *honest, ((0, 1, 2), [lie] * 3)))
        assert (torch.tensor([1.0, 1.1, 1.2]) <= found).all() and (found <= torch.tensor([3.0, 3.1, 3.2])).all()
    # three of four say 2: the fourth has no say at all
    assert of(MEDIAN, *[((0,), [2.0])] * 3, ((0,), [3e38])) == [2.0, 20.0, 30.0]


def test_the_trimmed_mean_by_hand() -> None:
    # five values, a fifth is one at each end: (2 + 3 + 7) / 3 = 4; coordinate 1 has three values: its middle one
    updates = [((0, 1), [1e30, 8.0]), ((0, 1), [2.0, 1e30]), ((0, 1), [3.0, 9.0]), ((0,), [-1e30]), ((0,), [7.0])]
    assert of(FIFTH, *updates) == [4.0, 9.0, 30.0]


def test_of_one_or_two_values_none_can_be_left_out() -> None:
    assert of(FIFTH, ((0,), [1.0])) == [1.0, 20.0, 30.0]
    assert of(FIFTH, ((0,), [1.0]), ((0,), [2.0])) == [1.5, 20.0, 30.0]


def test_how_many_are_left_out_at_each_end() -> None:
    tenth = Robust(Fraction(1, 10))
    assert [tenth.cut_off(n) for n in (1, 2, 3, 5, 10, 11, 20, 30)] == [0, 0, 1, 1, 1, 2, 2, 3]
    assert [Robust(Fraction(49, 100)).cut_off(n) for n in (3, 4, 5, 10)] == [1, 1, 2, 4]
    assert [MEDIAN.cut_off(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]


def test_rules_by_name() -> None:
    assert parse_aggregation("mean") is None and parse_aggregation("median") == MEDIAN
    assert parse_aggregation("trimmed") == parse_aggregation("trimmed:0.1") == Robust(Fraction(1, 10))
    for wrong in (
        "",
        "krum",
        "median:0.1",
        "mean:",
        "trimmed:",
        "trimmed:0",
        "trimmed:0.5",
        "trimmed:nan",
        "trimmed:-1",
    ):
        with pytest.raises(BadInput, match="mean, median or trimmed:SHARE"):
            parse_aggregation(wrong)


VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(values=VALUES, share=st.sampled_from(["0.05", "0.1", "0.25", "0.49"]))
def test_against_the_definition(values: list[float], share: str) -> None:
    found = of(MEDIAN, *[((0,), [value]) for value in values])[0]
    assert math.isclose(found, statistics.median(values), rel_tol=1e-6, abs_tol=1e-6)
    rule = parse_aggregation(f"trimmed:{share}")
    assert rule is not None
    ends = rule.cut_off(len(values))
    inner = sorted(values)[ends : len(values) - ends]
    assert math.isclose(of(rule, *[((0,), [v]) for v in values])[0], sum(inner) / len(inner), rel_tol=1e-5, abs_tol=0.1)


@settings(max_examples=60, deadline=None)
@given(honest=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=7), lie=st.floats(width=32, allow_nan=False,
       allow_infinity=False), data=st.data())  # fmt: skip
def test_a_minority_of_liars_stays_among_the_honest(honest: list[float], lie: float, data: Any) -> None:
    liars = data.draw(st.integers(1, len(honest) - 1))
    found = of(MEDIAN, *[((0,), [value]) for value in [*honest, *[lie] * liars]])[0]
    assert min(honest) <= found <= max(honest)


def test_the_bits_depend_neither_on_the_order_nor_on_how_much_is_sorted_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = [((0, 1, 2), [0.1, 1 / 3, 1e-30]), ((0, 1), [0.2, 0.7]), ((1, 2), [1e8, 3.0]), ((0, 1), [0.3, -5e-3])]
    for rule in (MEDIAN, FIFTH):
        expected = of(rule, *updates)
        assert all(of(rule, *order) == expected for order in permutations(updates))
        monkeypatch.setattr(robust, "COLUMNS", 1)
        assert of(rule, *updates) == expected
        monkeypatch.undo()


def test_real_cuts_of_different_widths() -> None:
    """Random cuts of a network, against a loop over coordinates."""
    graph = tiny.graph()
    state = {name: tensor.clone() for name, tensor in tiny.model().state_dict().items()}
    kept, seen = KeptUpdates(state, MEDIAN), {}
    for device, scale in enumerate((0.5, 0.5, 0.75, 1.0)):
        cut = graph.random(scale, generator(0, "test", device))
        noise = generator(1, "test", device)
        update = {name: torch.randn(cut.shapes[name], generator=noise) for name in cut.trained}
        kept.add(cut, update)
        wide = {name: torch.full_like(state[name], math.nan) for name in cut.trained}
        cut.scatter(wide, update)
        for name, tensor in wide.items():
            seen.setdefault(name, []).append(tensor.flatten().tolist())
    after, _ = ServerOptimizer().apply(state, {}, kept)
    assert set(kept.changed) == set(seen) == set(dict(tiny.model().named_parameters()))
    for name, rows in seen.items():
        for place, values in enumerate(zip(*rows, strict=True)):
            there = [value for value in values if not math.isnan(value)]
            expected = statistics.median(there) if there else state[name].flatten()[place].item()
            assert after[name].flatten()[place].item() == pytest.approx(expected, abs=1e-7)


# --- in a round and in a run ---------------------------------------------------------------------------------------


def huge(update: Any) -> Any:
    return replace(update, tensors={name: torch.full_like(t, 1e30) for name, t in update.tensors.items()})


def test_a_round_with_a_liar() -> None:
    honest = Lying()
    one_round(honest)
    lies = {honest.asked[1]: huge}
    spoilt, _, _ = one_round(Lying(lies))
    assert max(float(tensor.abs().max()) for tensor in spoilt.tensors.values()) > 1e29
    for rule in ("median", "trimmed:0.25"):
        after, record, _ = one_round(Lying(lies), robust=parse_aggregation(rule))
        assert record["dropped"] == []  # finite and of the right shape: no check finds it out
        assert max(float(tensor.abs().max()) for tensor in after.tensors.values()) < 10
        backward, _, _ = one_round(Lying(lies, backwards=True), robust=parse_aggregation(rule))
        assert same(after, backward)


def test_a_round_of_two_updates_is_redone_with_others() -> None:
    first = Lying()
    one_round(first)
    engine = Lying(dict.fromkeys(first.asked[:2], nan))
    _, record, log = one_round(engine, robust=MEDIAN)
    assert "round 0 had 2 of 3 updates and is redone with other devices" in log
    assert len(record["devices"]) == 8


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(BadInput, match="one voice: leave out weighted"):
        RunOptions.of(aggregation="median", weighted=True)
    with pytest.raises(BadInput, match="needs 3 or more devices per round, not 2"):
        one_round(Lying(), per_round=2, robust=MEDIAN)
    with pytest.raises(BadInput, match="mean, median or trimmed"):
        RunOptions.of(aggregation="krum")


def test_a_run_by_median(tmp_path: Any) -> None:
    first, again = (tiny.tiny_run(tmp_path / name, "fd", aggregation="median", rounds=2) for name in ("one", "two"))
    plain = tiny.tiny_run(tmp_path / "plain", "fd", rounds=2)
    assert tiny.bits(first.out) == tiny.bits(again.out) != tiny.bits(plain.out)
