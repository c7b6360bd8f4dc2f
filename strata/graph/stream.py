"""The residual stream: what the blocks of a network add to.

A sum is one of the stream if one operand is computed from the other by a layer or more: x + f(x).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, fx

from strata.ops.channels import family


def stream_nodes(graph: fx.Graph, sources: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The sums."""
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        operands = [x for x in node.args[:2] if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)]
        if node.op != "call_function" or family(node) not in ("add", "add_") or len(operands) < 2:
            continue
        a, b = operands
        if _passes_layer(nodes[:position], sources, a, b) or _passes_layer(nodes[:position], sources, b, a):
            yield node


def _passes_layer(nodes: list[fx.Node], sources: Collection[fx.Node], start: fx.Node, end: fx.Node) -> bool:
    """Whether there is a way from one value to the other, and a layer on it."""
    if start.op == "get_attr":
        return False
    passed = {start: False}
    for node in nodes:
        before = [passed[x] for x in node.all_input_nodes if x in passed]
        if before and node not in passed:
            passed[node] = any(before) or node in sources
    return passed.get(end, False)
