"""Which layer (1..K) each parameter belongs to, found from the graph.

Every conv, linear, attention projection ... (a *source*) is put as late as it can be without delaying anything after
it. So layers follow execution order, parallel projections (q, k, v) share a layer, and a projection shortcut belongs to
the layer of the deeper branch that it joins. What comes last and has its outputs pinned is the classifier: layer K + 1.
All that lies before a layer in the graph is in an earlier layer, so freezing 1..k never needs a gradient to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from strata.core.errors import BadInput
from strata.graph.propagation import holds_tensor


@dataclass(frozen=True)
class Layers:
    names: tuple[str, ...]  # one per layer 1..K, by its first parameter's module
    of_parameter: dict[str, int]  # of several uses, the last
    uses: dict[str, tuple[int, ...]]  # the layers of each parameter's uses
    users: dict[str, dict[fx.Node, int]]  # of parameters in several layers: the operations that take it as it is


def find_layers(
    graph: fx.Graph,
    sources: dict[fx.Node, str],
    free: set[fx.Node],
    parameters: Sequence[str],
    wanted: Sequence[Sequence[str]] | None = None,
) -> Layers:
    """`free` sources have channels to choose; of the others, the last ones are the classifier."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    follows_source = _has_source_after(nodes, sources)
    classifiers = {n for n in sources if n not in free and not follows_source[n]}
    if wanted is None:
        level = _latest_levels(nodes, sources, classifiers)
    else:
        level = _wanted_levels(nodes, sources, classifiers, wanted)
    depth = max((level[n] for n in sources if n not in classifiers), default=0)
    users = _users(nodes, sources, level)
    uses = {name: tuple(sorted({k for _, k in users.get(name, [])})) or (depth + 1,) for name in parameters}
    shared = {name for name, layers in uses.items() if len(layers) > 1}
    return Layers(
        _layer_names(sources, level, depth),
        {name: layers[-1] for name, layers in uses.items()},
        uses,
        {name: {node: k for node, k in users[name] if _takes(node, name)} for name in shared},
    )


def _has_source_after(nodes: list[fx.Node], sources: dict[fx.Node, str]) -> dict[fx.Node, bool]:
    after: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        after[node] = any(user in sources or after.get(user, False) for user in node.users)
    return after


def _latest_levels(nodes: list[fx.Node], sources: dict[fx.Node, str], classifiers: set[fx.Node]) -> dict[fx.Node, int]:
    earliest: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((earliest.get(x, 0) for x in node.all_input_nodes), default=0)
        earliest[node] = before + (node in sources)
    depth = max((earliest[n] for n in sources if n not in classifiers), default=0)
    latest: dict[fx.Node, int] = {}  # the latest layer of a source; for others, of whatever comes before them
    for node in reversed(nodes):
        bounds = [latest[user] - (user in sources) for user in node.users if user in latest]
        latest[node] = min(bounds, default=depth)
        if node in classifiers:
            latest[node] = depth + 1
    return latest


def _wanted_levels(
    nodes: list[fx.Node], sources: dict[fx.Node, str], classifiers: set[fx.Node], wanted: Sequence[Sequence[str]]
) -> dict[fx.Node, int]:
    level: dict[fx.Node, int] = {}
    for node, parameter in sources.items():
        if node in classifiers:
            level[node] = len(wanted) + 1
            continue
        places = [
            index
            for index, prefixes in enumerate(wanted, start=1)
            if any(parameter == p or parameter.startswith(f"{p}.") for p in prefixes)
        ]
        if len(places) != 1:
            where = "none" if not places else " and ".join(map(str, places))
            raise BadInput(f"{parameter} is in {where} of the given layers; it must be in exactly one.")
        level[node] = places[0]
    missing = set(range(1, len(wanted) + 1)) - set(level.values())
    if missing:
        raise BadInput(
            f"given layer {min(missing)} ({', '.join(wanted[min(missing) - 1])}) holds no weight of the model."
        )
    reached: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((reached.get(x, 0) for x in node.all_input_nodes), default=0)
        if node in sources:
            if before > level[node]:
                raise BadInput(
                    f"{sources[node]} is given to layer {level[node]}, but needs what layer {before} computes; "
                    "layers must follow the order of the computation."
                )
            before = level[node]
        reached[node] = before
    return level


def _users(
    nodes: list[fx.Node], sources: dict[fx.Node, str], level: dict[fx.Node, int]
) -> dict[str, list[tuple[fx.Node, int]]]:
    """Where each parameter meets the model's data, and in which layer.

    A norm, and whatever else is not a source, belongs to the last layer that its input comes from. A parameter that is
    first viewed, expanded or computed with belongs where the result meets the data."""
    reached = {x: 0 for node in nodes for x in node.all_input_nodes if x.op == "placeholder"}
    carried: dict[fx.Node, list[str]] = {}  # the parameters in a value that no data has reached
    found: dict[str, list[tuple[fx.Node, int]]] = {}
    for node in nodes:
        if not holds_tensor(node.meta.get("val")):
            continue  # a size is no data: q.expand(len(x), -1) depends on q alone
        before = [reached[x] for x in node.all_input_nodes if x in reached]
        own = [name for x in node.all_input_nodes for name in _parameters_in(x, carried)]
        if node not in sources and not before:
            carried[node] = own
            continue
        reached[node] = level[node] if node in sources else max(before)
        for name in own:
            found.setdefault(name, []).append((node, max(reached[node], 1)))
    return found


def _takes(node: fx.Node, name: str) -> bool:
    return any(x.op == "get_attr" and x.target == name for x in node.all_input_nodes)


def _parameters_in(x: fx.Node, carried: dict[fx.Node, list[str]]) -> list[str]:
    return [str(x.target)] if x.op == "get_attr" else carried.get(x, [])


def _layer_names(sources: dict[fx.Node, str], level: dict[fx.Node, int], depth: int) -> tuple[str, ...]:
    """Named by the module of its first weight on the main branch (the first in execution order)."""
    names = [""] * depth
    for node, parameter in sources.items():
        k = level[node]
        if 1 <= k <= depth and not names[k - 1]:
            names[k - 1] = parameter.rpartition(".")[0] or parameter
    return tuple(names)
