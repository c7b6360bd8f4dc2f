from __future__ import annotations

import mmap

from strata.planning.runtime import data_bytes, resident_bytes, runtime_bytes, start_measuring, stop_measuring


def test_python_and_torch_hold_a_plausible_amount() -> None:
    held = runtime_bytes()
    assert held is not None and 60 * 2**20 < held < 1500 * 2**20


def test_what_cannot_be_measured_is_none() -> None:
    child = start_measuring()
    stop_measuring(child)
    assert runtime_bytes(child) is None


def test_own_process() -> None:
    before = data_bytes()
    block = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE)  # new pages: malloc may hand out what it has left
    assert data_bytes() - before >= 0.99 * len(block)
    assert resident_bytes() > 10 * 2**20
