"""A warm module that other cuts have used computes what a fresh submodel does."""

from __future__ import annotations

import pytest
import torch

from tests.networks import NETWORKS, graph_of
from tests.workspaces import workspace_of


@pytest.mark.parametrize("name", ["gated", "padded_resnet", "vgg"])  # chunk, padding and view depend on what is kept
def test_warm_equals_fresh(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, shape = NETWORKS[name]()
    graph = graph_of(name)
    workspace = workspace_of(graph)
    state = net.state_dict()
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    cuts = [graph.random(0.5, torch.Generator().manual_seed(seed)) for seed in range(6)]
    cuts += [
        graph.prefix(0.5),
        graph.rolling(0.5, 3),
        graph.rolling(0.5, 11),
        graph.slt(1, 2, 0.5),
        graph.slt(0, 2, 0.5),
    ]
    for training in (True, False):
        for cut in cuts:
            tensors = cut.extract(state)
            used, fresh = workspace.submodel(cut), graph.submodel(cut, tensors)
            used.load(tensors)
            if training and name == "vgg":
                continue  # dropout
            results = [m.train(training)(x) for m, x in ((used.module, used.arranged((images,))[0]), (fresh, images))]
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert len({workspace.structure(cut) for cut in cuts}) < len(cuts) or name == "padded_resnet"
