"""One style, no date inside, one sentence where a picture cannot be written."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest

from strata.core.errors import BadInput
from strata.core.pictures import PLAIN_TEXT, blank, encoded, save, style


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_content_is_the_same_file(kind: str) -> None:
    def drawn() -> bytes:
        with style(PLAIN_TEXT):
            figure, axes = blank(2, 1)
            axes.plot([1, 2], label="$x_{")  # a name that TeX could not read
            axes.legend()
            return encoded(figure, kind)

    assert drawn() == drawn()


def test_the_style_ends_with_its_block() -> None:
    before = matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]
    with style({"font.size": 30}):
        assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]) == (30, True)
    assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]) == before


def test_where_it_is_saved(tmp_path: Path) -> None:
    figure, _ = blank(1, 1)
    save(figure, tmp_path / "plain")
    assert (tmp_path / "plain.png").read_bytes().startswith(b"\x89PNG")
    for name in ("x.docx", "absent/x.png"):
        with pytest.raises(BadInput, match="cannot write the picture to"):
            save(figure, tmp_path / name)
