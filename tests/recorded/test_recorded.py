"""Restructuring moves no bit: ten short runs come to what they came to before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recorded.runs import FILE, RUNS, play, processor

KEPT = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_to_what_it_came_to(name: str, tmp_path: Path) -> None:
    found = play(name, tmp_path)
    assert found["counts"] == KEPT["counts"][name]
    bits = KEPT["bits"].get(processor())
    if bits is not None:  # another processor rounds otherwise
        assert {key: found[key] for key in ("metrics", "model")} == bits[name]
