"""Secure sums among real processes, one of which poisons its own and one of which is killed: a small form of the
benchmark that has twenty."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")
from benchmarks.secure_fleet import secure


@pytest.mark.slow
def test_poison_is_left_out_and_a_death_costs_one_update(tmp_path: Path) -> None:
    found = secure(honest=9, hostile=1, killed=1, rounds=2, folder=tmp_path)
    first, second = map(set, found["heard"])
    assert found["killed"] == ["killed-0"]
    for heard in (first, second):
        assert "hostile-poison" not in heard and len(heard) >= 4
    assert "killed-0" not in second
    assert found["last_reasons"]["hostile-poison"]  # of its last sum; which one that was is a matter of who was lost
