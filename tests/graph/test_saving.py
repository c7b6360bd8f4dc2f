"""A submodel is an ordinary module: it can be saved and copied; without weights it says so."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from tests.federation import tiny


def test_a_submodel_is_saved_and_read(tmp_path: Path) -> None:
    graph, model = tiny.graph(), tiny.model()
    cut = graph.slt(1, 2, 0.5)
    small = graph.submodel(cut, cut.extract(model.state_dict()))
    x = torch.rand(2, 3, 8, 8)
    torch.save(small, tmp_path / "small.pt")
    read = torch.load(tmp_path / "small.pt", weights_only=False)
    others = [read, pickle.loads(pickle.dumps(small)), copy.deepcopy(small)]
    expected = small.eval()(x), small.train()(x)  # the latter moves running statistics
    for one in others:
        assert torch.equal(one.eval()(x), expected[0]) and torch.equal(one.train()(x), expected[1])
        assert one.cut == cut
        assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in small.parameters()]
    twin = copy.deepcopy(small)
    next(twin.parameters()).data.zero_()
    assert next(small.parameters()).any()
    assert twin.train_graph is small.train_graph


def test_zeros_are_not_handed_out_silently() -> None:
    graph = tiny.graph()
    with pytest.warns(UserWarning, match="without a state has zeros for weights: give cut.extract"):
        graph.submodel(graph.full())
