"""Which values of the graph are outputs of leaf modules: the paper's accounting counts each such output once.

A leaf module that only passes its input on (nn.Identity as a shortcut) leaves no operation in the graph; it counts
once more for the value that it passes on. One that works in place (nn.ReLU(inplace=True)) returns its input too, but
changed: that is an output of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree


@dataclass
class LeafCalls:
    """Leaf modules in the order in which they were called, and whose output each pass-through returned."""

    producer: dict[int, str] = field(default_factory=dict)  # id of a tensor -> leaf module that returned it last
    passed_on: list[str] = field(default_factory=list)  # producers whose output a pass-through returned
    tensors: dict[str, int] = field(default_factory=dict)  # leaf module -> how many it returns, where several
    alive: list[Tensor] = field(default_factory=list)  # keeps ids from being used again


@contextmanager
def watch_leaf_modules(model: nn.Module) -> Iterator[LeafCalls]:
    calls = LeafCalls()
    versions: dict[int, int] = {}  # of the inputs of the leaf that runs: a change in place raises them

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        versions.clear()
        versions.update({id(x): x._version for x in inputs if isinstance(x, Tensor)})

    def hook(name: str) -> Any:
        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor):
                calls.tensors[name] = sum(isinstance(one, Tensor) for one in pytree.tree_leaves(output))
                return
            if versions.get(id(output)) == output._version:
                if id(output) in calls.producer:
                    calls.passed_on.append(calls.producer[id(output)])
            else:
                calls.producer[id(output)] = name
                calls.alive.append(output)

        return after

    leaves = [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_pre_hook(before) for _, module in leaves]
    handles += [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        yield calls
    finally:
        calls.alive.clear()
        for handle in handles:
            handle.remove()


def count_leaf_outputs(graph: fx.Graph, calls: LeafCalls) -> dict[fx.Node, int]:
    of_call: dict[str, list[fx.Node]] = {}
    names: dict[str, str] = {}
    inner: set[str] = set()
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op == "call_function" and stack and isinstance(node.meta.get("val"), Tensor):
            *outer, (key, (name, _)) = stack.items()
            inner.update(k for k, _ in outer)
            of_call.setdefault(key, []).append(node)
            names[key] = name
    counts: dict[fx.Node, int] = {}
    by_name: dict[str, fx.Node] = {}
    for key, nodes in of_call.items():
        if key not in inner:  # a module in which others ran is not a leaf
            for node in nodes[::-1][: calls.tensors.get(names[key], 1)]:  # what it made last is what it returned
                counts[node] = counts.get(node, 0) + 1
            by_name[names[key]] = nodes[-1]
    for name in calls.passed_on:
        if name in by_name:
            counts[by_name[name]] += 1
    return counts
