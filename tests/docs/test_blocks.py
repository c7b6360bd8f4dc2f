"""Every block of the pages that a newcomer reads first does what the page says. How a page says it: pages.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import FIRST, Block, all_pages, read
from tests.docs.playing import Warm, play

SKIPPED = [block for page in all_pages() for block in read(page) if block.skip is not None]


@pytest.mark.parametrize("page", FIRST)
def test_page(page: str, warm: Warm, tmp_path: Path) -> None:
    play(read(page), tmp_path / "here", warm)


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.where)
def test_skipped_block(block: Block) -> None:
    """So that pytest lists them."""
    pytest.skip(str(block.skip))
