"""One workspace per graph, so that tests build each submodel once, as a process does."""

from __future__ import annotations

from functools import cache

from strata.graph import ChannelGraph
from strata.training import Workspace


@cache
def workspace_of(graph: ChannelGraph) -> Workspace:
    return Workspace(graph)
