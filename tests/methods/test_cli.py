from __future__ import annotations

import json

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.methods import METHODS, Entry, FedAvg, register

NAMES = ["slt", "fedavg", "small", "fd", "fedrolex", "heterofl", "fjord"]


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
    with pytest.raises(BadInput, match="already"):
        register(Entry("fedavg", "", "", "", "", FedAvg))
    mine = Entry("mine", "all", "all", "none", "this test", FedAvg)
    register(mine)
    try:
        assert METHODS["mine"] is mine
    finally:
        del METHODS["mine"]
