"""What a model returns: its tensors by name, and which operations each of them needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

LOGITS = "logits"


def named_outputs(graph: fx.Graph, structure: pytree.TreeSpec | None) -> dict[str, fx.Node]:
    """The tensors that a model returns in a tensor, a tuple, a dict or an object like those of HuggingFace.

    `logits`, or else the first that holds numbers, comes first: methods learn from it. Empty: there is none."""
    values = pytree.tree_leaves(graph.output_node().args)
    returned = values if structure is None else pytree.tree_unflatten(values, structure)
    named = {name: node for name, node in _named(returned, "") if _is_tensor(node)}
    floating = [name for name, node in named.items() if node.meta["val"].is_floating_point()]
    if not floating:
        return {}
    first = LOGITS if LOGITS in floating else floating[0]
    return {first: named.pop(first), **named}


def further_scores(outputs: dict[str, fx.Node]) -> list[fx.Node]:
    """Other outputs with as many scores, such as those of a second classifier: as the first, they stay whole."""
    first, *others = outputs.values()
    sizes = first.meta["val"].shape[1:]
    return [node for node in others if node.meta["val"].shape[1:] == sizes]


def needed_for(graph: fx.Graph, output: fx.Node, outputs: int) -> set[fx.Node]:
    """The nodes that this one of several outputs needs; what only the others need does not run.

    What changes one of these values in place is needed too, and what counts in a module that runs (batches)."""
    if outputs == 1:
        return set(graph.nodes)
    needed: set[fx.Node] = set()
    _add_with_inputs(output, needed)
    while True:
        missing = [node for node in graph.nodes if node not in needed and _changes(node, needed)]
        if not missing:
            return needed
        for node in missing:
            _add_with_inputs(node, needed)


def _add_with_inputs(node: fx.Node, needed: set[fx.Node]) -> None:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in needed:
            needed.add(one)
            waiting += one.all_input_nodes


def _owner(node: fx.Node) -> str:
    """The module that a parameter or buffer belongs to."""
    return str(node.target).rpartition(".")[0]


def _changes(node: fx.Node, needed: set[fx.Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return False
    owners = {_owner(one) for one in needed if one.op == "get_attr"}
    value: Any = node.args[0]
    while isinstance(value, fx.Node):  # through views, to what holds the memory
        if value in needed or (value.op == "get_attr" and _owner(value) in owners):
            return True
        value = value.args[0] if value.args and _may_share_memory(value) else None
    return False


def _may_share_memory(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _named(value: Any, prefix: str) -> Iterator[tuple[str, fx.Node]]:
    if isinstance(value, fx.Node):
        yield prefix or "output", value
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    for key, part in parts:
        yield from _named(part, f"{prefix}.{key}" if prefix else str(key))


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 0
