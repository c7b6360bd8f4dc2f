"""Channel graphs of the test networks, made once: exporting takes a second, counting bytes a millisecond."""

from __future__ import annotations

from functools import cache

import torch

from strata.cutting import ChannelGraph, Cut
from strata.models import densenet40, resnet20, resnet44
from tests.networks import NETWORKS

torch.set_num_threads(1)


@cache
def graph_of(name: str) -> ChannelGraph:
    model, input_shape = NETWORKS[name]()
    return ChannelGraph(model, input_shape)


def cuts_of(graph: ChannelGraph) -> dict[str, Cut]:
    """Every kind of cut, and SLT at the first, a middle and the last steps."""
    depth = graph.depth
    cuts = {
        "full": graph.full(),
        "prefix": graph.prefix(0.3),
        "rolling": graph.rolling(0.5, 3),
        "random": graph.random(0.4, torch.Generator().manual_seed(1)),
        "pre-training": graph.slt(0, 0, 0.3),
        "step 1": graph.slt(0, 1, 0.3),
        "one third": graph.slt(depth // 3, depth // 3 + 1, 0.4),
        "two thirds": graph.slt(2 * depth // 3, 2 * depth // 3 + 1, 0.7),
        "last step": graph.slt(depth - 1, depth, 1.0),
        "everything but the classifier frozen": graph.slt(depth, depth, 1.0),
    }
    return cuts


@cache
def paper_graph(network: str, classes: int | None = None) -> ChannelGraph:
    """The paper's networks at their own input size; `classes` None: those of their data set."""
    build, own_classes, size = {
        "ResNet20": (resnet20, 10, 32),
        "ResNet44": (resnet44, 200, 64),
        "DenseNet40": (densenet40, 100, 32),
    }[network]
    return ChannelGraph(build(classes or own_classes, size), (3, size, size))
