from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.federation.checking import problem_with
from tests.federation.fakes import RowCut, task, update_for

STATE = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "frozen": torch.zeros(4)}
CUT = RowCut.of(STATE, {"a": (0, 2)}, frozen=("frozen",))
TASK = task(CUT, round=4, device=7)
GOOD = update_for(TASK)


def with_tensor(name: str, tensor: object) -> object:
    return replace(GOOD, tensors={**GOOD.tensors, name: tensor})


def test_a_good_update_has_no_problem() -> None:
    assert problem_with(GOOD, TASK, STATE) is None
    assert problem_with(replace(GOOD, loss=1e6, peak_bytes=2**50), TASK, STATE) is None
    assert problem_with(GOOD, TASK, STATE, norm_bound=2.45) is None  # 6 ones: norm 2.449


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (None, "sent nothing"),
        ("hello", "not an update"),
        (replace(GOOD, round=3), "round 3"),
        (replace(GOOD, device=1), "in the name of device 1"),
        (replace(GOOD, cut_hash="other"), "another cut"),
        (replace(GOOD, tensors={"a": torch.ones(2)}), r"missing \['b'\]"),
        (with_tensor("frozen", torch.ones(4)), r"not asked for \['frozen'\]"),
        (with_tensor("a", torch.ones(3)), r"shape \(3,\), not \(2,\)"),
        (with_tensor("a", torch.ones(2, dtype=torch.float64)), "float64"),
        (with_tensor("a", torch.tensor([1.0, float("nan")])), "not finite"),
        (with_tensor("b", torch.full((2, 2), float("-inf"))), "not finite"),
        (with_tensor("a", [1.0, 1.0]), "not a plain tensor"),
        (with_tensor("a", torch.ones(2).to_sparse()), "not a plain tensor"),
        (replace(GOOD, tensors=5), "not an update"),
        (replace(GOOD, round="\x1b]0;owned\x07\nFAKE"), r"round '\\x1b\]0;owned\\x07\\nFAKE'$"),
        (replace(GOOD, device=7.0), "in the name of device 7.0"),
        (replace(GOOD, samples=10**400), "trained on 1000"),
        (replace(GOOD, loss=1e308), "loss is 1e"),
        (replace(GOOD, loss=1.1e6), "loss is 1100000.0"),
        (replace(GOOD, peak_bytes=2**50 + 1), "peak memory is 1125899906842625"),
        (replace(GOOD, peak_bytes=10**400), "peak memory is 1000"),
        (replace(GOOD, samples=0), "0 samples"),
        (replace(GOOD, samples="many"), "'many' samples"),
        (replace(GOOD, loss=float("nan")), "loss is nan"),
        (replace(GOOD, loss=None), "loss is None"),
        (replace(GOOD, peak_bytes=-1), "peak memory"),
    ],
)
def test_what_is_wrong_is_said(update: object, says: str) -> None:
    problem = problem_with(update, TASK, STATE)
    assert problem is not None
    assert __import__("re").search(says, problem), problem


def test_a_device_cannot_claim_more_samples_than_it_has() -> None:
    assert problem_with(GOOD, TASK, STATE, most_samples=GOOD.samples) is None
    problem = problem_with(GOOD, TASK, STATE, most_samples=GOOD.samples - 1)
    assert problem is not None and "samples, of at most" in problem


def test_the_norm_bound_is_about_the_change() -> None:
    state = {**STATE, "a": torch.full((3,), 100.0)}
    problem = problem_with(GOOD, TASK, state, norm_bound=2.5)
    assert problem is not None and "norm 140" in problem  # sqrt(2 * 99^2 + 4)
