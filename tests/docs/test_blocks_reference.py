"""Every block of the reference pages does what the page says. How a page says it: pages.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import FIRST, all_pages, read
from tests.docs.playing import Warm, play


@pytest.mark.parametrize("page", [page for page in all_pages() if page not in FIRST])
def test_page(page: str, warm: Warm, tmp_path: Path) -> None:
    play(read(page), tmp_path / "here", warm)
