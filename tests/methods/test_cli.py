from __future__ import annotations

import json

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.methods import METHODS, Card, FedAvg, register
from strata.runs.unused import of_some_methods, refuse_unused, users_of

NAMES = ["slt", "fedavg", "small", "fd", "fedrolex", "heterofl", "fjord", "top", "window", "cycle", "bias", "lora"]


def test_lists_methods_with_their_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES) and "Caldas" in text and "variant, pool" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == NAMES
    assert listed[3]["options"] == ["seed", "variant", "pool"]


def test_a_name_is_taken_once() -> None:
    class Mine(FedAvg):
        card = Card("mine", trains="all")

    class Other(FedAvg):
        card = Card("fedavg")

    with pytest.raises(BadInput, match="already"):
        register(Other)
    assert register(Mine) is Mine
    try:
        assert METHODS["mine"] is Mine and register(Mine) is Mine, "the same one again does no harm"
    finally:
        del METHODS["mine"]


def test_every_method_has_a_card_for_tables_and_pictures() -> None:
    cards = [method.card for method in METHODS.values()]
    assert [card.name for card in cards] == [method.name for method in METHODS.values()] == NAMES
    assert len({card.colour for card in cards}) == len(cards)
    for card in cards:
        assert card.colour is not None and card.label and card.trains and card.evaluates and card.levels and card.paper


def test_options_are_those_of_the_cards() -> None:
    named = {option for method in METHODS.values() for option in method.card.options} - {"seed"}
    assert (
        set(of_some_methods())
        == named
        == {"schedule", "patience", "head_fraction", "fill", "averaging", "variant", "pool", "rank", "targets"}
    )
    assert users_of("schedule") == ["slt"] and users_of("pool") == ["fd"]
    with pytest.raises(BadInput, match="--pool is for the method fd, not for small or slt: leave it out"):
        refuse_unused({"pool": 3}, ["small", "slt"])
    with pytest.raises(BadInput, match="--head-fraction is for the method slt, not for fd"):
        refuse_unused({"head_fraction": 0.5, "variant": "shared"}, ["fd"])
    refuse_unused({"pool": 3, "variant": "pool"}, ["fd", "small"])
