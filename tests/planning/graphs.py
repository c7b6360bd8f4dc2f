"""Exported once per process: export is the slow part."""

from __future__ import annotations

from functools import cache

from strata.cutting import ChannelGraph
from strata.models.loading import load_model

SETTINGS = {"ResNet20": (10, 32), "ResNet44": (200, 64), "DenseNet40": (100, 32)}


@cache
def graph_of(name: str, classes: int | None = None) -> ChannelGraph:
    own, size = SETTINGS[name]
    shape = (3, size, size)
    return ChannelGraph(load_model(name.lower(), classes or own, shape), input_shape=shape)
