from __future__ import annotations

from strata.planning.runtime import data_bytes, resident_bytes, runtime_bytes


def test_python_and_torch_hold_a_plausible_amount() -> None:
    assert 60 * 2**20 < runtime_bytes() < 1500 * 2**20


def test_own_process() -> None:
    before = data_bytes()
    block = bytearray(64 * 2**20)
    assert data_bytes() - before >= 0.99 * len(block)
    assert resident_bytes() > 10 * 2**20
