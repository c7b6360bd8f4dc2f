"""What a comparison comes to: by hand, from folders made by hand, with methods that nobody has given a colour."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from strata.core.errors import BadInput
from strata.methods import METHODS, Small
from strata.methods.card import Card
from strata.results import appearance
from strata.results.appearance import colour_of, colours_of, label_of
from strata.results.comparison import gather, write_comparison
from tests.report.made import make_run

SUMMARY: dict[str, Any] = {
    "upload_bytes": 4000, "download_bytes": 8000, "train_flops": 40, "peak_bytes": 3 << 20, "seconds": 8.0,
}  # fmt: skip


def finished(folder: Path, method: str, seed: int) -> Path:
    """Round r has (r + 1) / 10 + seed / 100; each seed takes 10 bytes and 1 byte of memory more."""
    make_run(folder, method=method, seed=seed)
    own = {"accuracy": 0.4 + seed / 100, "upload_bytes": 4000 + 10 * seed, "peak_bytes": (3 << 20) + seed}
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **own}))
    return folder


def test_rows_by_hand(tmp_path: Path) -> None:
    row = gather("small", [finished(tmp_path / str(seed), "small", seed) for seed in (0, 2)])
    assert row.accuracies == pytest.approx((0.4, 0.42)) and row.mean == pytest.approx(0.41)
    assert row.std == pytest.approx(0.02 / math.sqrt(2))  # sample deviation of two values 0.02 apart
    assert (row.upload_bytes, row.download_bytes, row.train_flops, row.seconds) == (4010, 8000, 40, 8)
    assert row.peak_bytes == (3 << 20) + 2
    assert row.curve.rounds == (1, 2, 3, 4) and row.curve.mean == pytest.approx((0.11, 0.21, 0.31, 0.41))
    told = row.to_json()
    assert list(told) == [
        "method", "accuracy_mean", "accuracy_std", "accuracies", "upload_bytes", "download_bytes", "train_flops",
        "peak_bytes", "over_budget_bytes", "seconds", "rounds", "curve",
    ]  # fmt: skip
    assert told["rounds"] == [1, 2, 3, 4] and told["curve"] == list(row.curve.mean)


def test_methods_without_a_colour_are_compared(tmp_path: Path) -> None:
    """Once this trained everything and then failed with a KeyError."""
    names = ("slt", "mine", "pkg.mod:Yours", "theirs")
    folders = {name: [finished(tmp_path / str(number), name, 0)] for number, name in enumerate(names)}
    rows = write_comparison(folders, tmp_path)
    assert [row.method for row in rows] == list(names)
    assert json.loads((tmp_path / "summary.json").read_text()) == [row.to_json() for row in rows]
    drawn = (tmp_path / "accuracy.svg").read_text()
    assert drawn.startswith("<?xml") and (tmp_path / "accuracy.png").stat().st_size > 5000
    for name, colour in zip(names, colours_of(names), strict=True):
        assert name in drawn and colour in drawn


def test_colours_are_stable_and_distinct() -> None:
    assert colour_of("slt") == "#e07a10" and label_of("slt") == "SLT" and label_of("mine") == "mine"
    assert colour_of("mine") == colour_of("mine") == "#2e8b57"  # of the name alone, in every process
    built_in = {name: method.card.colour for name, method in METHODS.items()}
    assert colour_of("mine") not in built_in.values()
    every = [*built_in, *(f"method-{n}" for n in range(len(appearance.OTHER_COLOURS)))]
    assert len(set(colours_of(every))) == len(every)
    assert len(colours_of([str(n) for n in range(100)])) == 100  # more than there are colours
    assert colours_of(list(built_in)) == list(built_in.values())


def test_a_registered_method_is_shown_as_its_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Small):
        card = Card("mine", label="My method", colour="#123456")

    class Plain(Small):
        card = Card("plain")

    monkeypatch.setitem(METHODS, "mine", Mine)
    monkeypatch.setitem(METHODS, "plain", Plain)
    assert (label_of("mine"), colour_of("mine")) == ("My method", "#123456")
    assert label_of("plain") == "plain" and colour_of("plain") in appearance.OTHER_COLOURS


def test_a_summary_that_is_not_ours_is_said(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", "small", 0)
    (folder / "summary.json").write_text('{"accuracy": "high"}')
    with pytest.raises(BadInput, match="summary.json is not as Strata writes it: it holds no number accuracy"):
        gather("small", [folder])
    (folder / "summary.json").unlink()
    with pytest.raises(BadInput, match="there is no summary.json"):
        gather("small", [folder])
