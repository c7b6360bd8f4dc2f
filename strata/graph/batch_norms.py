"""The batch norms of a model: where each keeps its statistics, and whose parameters they go with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from strata.ops.channels import family

MEAN, VARIANCE, TRAINING = 3, 4, 5  # where they stand among aten.batch_norm's arguments


@dataclass(frozen=True)
class BatchNorm:
    """`mean` and `variance` name buffers; the first stands for the norm. Both are "" where it keeps no statistics.

    It is frozen with its `parameters`: its own, or, where it has none, the nearest ones that its input comes from."""

    mean: str
    variance: str
    parameters: tuple[str, ...]


def find_batch_norms(graph: fx.Graph, parameters: Iterable[str]) -> tuple[BatchNorm, ...]:
    """Of a training graph: those that use the batch's statistics."""
    known = set(parameters)
    found: dict[tuple[str, str], BatchNorm] = {}
    for node in graph.nodes:
        if not is_batch_norm(node) or not node.args[TRAINING]:
            continue
        own = tuple(name for name in map(_name, node.args[1:MEAN]) if name in known)
        mean, variance = _name(node.args[MEAN]), _name(node.args[VARIANCE])
        found.setdefault((mean, variance), BatchNorm(mean, variance, own or _nearest(node.args[0], known)))
    return tuple(found.values())


def is_batch_norm(node: fx.Node) -> bool:
    return node.op == "call_function" and family(node) == "batch_norm"


def with_fixed_statistics(graph: fx.Graph, means: Iterable[str]) -> fx.Graph:
    """The same graph, in which these batch norms use the statistics that their buffers hold, and leave them alone."""
    fixed = set(means)
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in new.nodes:
        if is_batch_norm(node) and _name(node.args[MEAN]) in fixed:
            node.args = (*node.args[:TRAINING], False, *node.args[TRAINING + 1 :])
    return new


def _name(argument: Any) -> str:
    """Of a parameter or buffer."""
    return str(argument.target) if isinstance(argument, fx.Node) and argument.op == "get_attr" else ""


def _nearest(node: Any, parameters: set[str]) -> tuple[str, ...]:
    """The parameters of the operations that a value comes from, through those that have none."""
    waiting, seen, found = [node], set(), dict[str, None]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, fx.Node) or one in seen:
            continue
        seen.add(one)
        own = [name for name in map(_name, one.all_input_nodes) if name in parameters]
        found |= dict.fromkeys(own)
        waiting += [] if own else one.all_input_nodes
    return tuple(found)
