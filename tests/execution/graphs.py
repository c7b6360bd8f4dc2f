"""Every kind of cut of a test network."""

from __future__ import annotations

import torch

from strata.graph import ChannelGraph, Cut

torch.set_num_threads(1)


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
