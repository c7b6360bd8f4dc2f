from __future__ import annotations

from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.planning.make import plan
from strata.planning.picture import draw, save_picture
from tests.networks import paper_graph


@pytest.mark.parametrize("settings", [{}, {"rounds": 3}, {"schedule": "early-stopping"}, {"constraint": [0.25, 0.5]}])
def test_every_kind_of_plan_can_be_drawn(settings: dict[str, object], tmp_path: Path) -> None:
    found = plan(paper_graph("ResNet20"), **{"constraint": 0.25, "rounds": 500, **settings})
    save_picture(found, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_same_plan_same_file(tmp_path: Path) -> None:
    found = plan(paper_graph("ResNet20"), constraint=1.0)
    for name in ("a.svg", "b.svg"):
        save_picture(found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_rectangles_are_where_the_plan_says() -> None:
    found = plan(paper_graph("ResNet20"), constraint=0.5, rounds=500)
    layers = draw(found).axes[0]
    boxes = {(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in layers.patches}
    start = 0
    for step in found.steps:
        width = step.until_round - start
        if width:
            assert (start, 0, width, step.k_frozen) in boxes
            assert (start, step.k_frozen, width, step.k_trained - step.k_frozen) in boxes
            assert (start, step.k_trained, width, 19 - step.k_trained) in boxes
        start = step.until_round


def test_bad_paths(tmp_path: Path) -> None:
    found = plan(paper_graph("ResNet20"), constraint=1.0)
    with pytest.raises(BadInput, match="such as plan.png"):
        save_picture(found, tmp_path / "plan.bmp")
    with pytest.raises(BadInput, match="cannot write"):
        save_picture(found, tmp_path / "absent" / "plan.png")
