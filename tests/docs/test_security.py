"""The tests that the page on security names are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"


def test_what_holds_has_its_tests() -> None:
    named = re.findall(r"`([a-z_]+/test_[a-z_]+\.py)(?:::(test_\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    for file, name in named:
        assert f"def {name or 'test_'}" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{name}"
