"""How wide a cut's trained convolutions are: it decides what pays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

WIDEST_FOR_KERNELS = 3.0  # channels; up to here, and with no frozen layers (whose wide maps would have to be turned
# around), our own convolutions are 1.5 to 2 times as quick as torch's grouped ones


def suits_kernels(graph: ChannelGraph, cut: Cut) -> bool:
    return not cut.frozen and mean_channels(graph, cut) <= WIDEST_FOR_KERNELS


def mean_channels(graph: ChannelGraph, cut: Cut) -> float:
    """Of the trained convolutions, over the positions of their maps; infinite where nothing of the kind is trained."""
    channels = positions = 0
    for op in graph.sized(cut, 1):
        if op.kind == "op" and op.requires_grad and "conv2d" in str(op.target):
            here = math.prod(op.shape[2:])
            channels += here * op.shape[1]
            positions += here
    return channels / positions if positions else math.inf
