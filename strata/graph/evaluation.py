"""The evaluation graph from the training graph, without exporting a second time, where that is sure to be the same.

A model knows its mode by `module.training`. Who reads it while the training graph is made is written down; where these
are torch's own batch norm and dropout only, the graphs differ in these operations alone. Otherwise (attention that
passes `dropout if self.training else 0`, a branch of the model's own) the model is exported in both modes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten
NORM, DROPOUT = "torch.nn.modules.batchnorm", "torch.nn.modules.dropout"


@dataclass
class Readers:
    """Of modules whose mode was asked for: where their class is from, and the file of the code that asked."""

    found: set[tuple[str, str]] = field(default_factory=set)
    has_own_modes: bool = False  # a class with a `train` or `training` of its own, which may do anything

    @property
    def are_known(self) -> bool:
        files = {sys.modules[name].__file__: name for name in (NORM, DROPOUT)}
        return not self.has_own_modes and all(files.get(file) == kind for kind, file in self.found)


@contextmanager
def watch_training_flags(model: nn.Module) -> Iterator[Readers]:
    """While it lasts, `training` is a property of all modules: it goes before what they hold under that name."""
    modules = list(model.modules())
    own = {id(module) for module in modules}
    readers = Readers(has_own_modes=any(_has_own_modes(type(module)) for module in modules))

    def read(module: nn.Module) -> bool:
        if id(module) in own:
            readers.found.add((type(module).__module__, sys._getframe(1).f_code.co_filename))
        return bool(vars(module)["training"])

    def write(module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield readers
    finally:
        del nn.Module.training


def _has_own_modes(kind: type) -> bool:
    known = [one for one in kind.__mro__ if one.__module__.startswith("torch.nn.modules.") or one is object]
    return any(name in vars(one) for one in kind.__mro__ if one not in known for name in ("train", "eval", "training"))


def evaluation_graph(training: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy in which batch norm uses its running statistics and dropout drops nothing; and its node for each node."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in training.nodes:
        if not _counts_batches(node):
            copies[node] = graph.node_copy(node, lambda one: copies[one])
            if _has_mode(node, NORM, aten.batch_norm.default) and node.args[3] is not None:
                _set(copies[node], 5, False)
            elif _has_mode(node, DROPOUT, *DROPOUTS):
                _set(copies[node], 2, False)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:  # counters of batches
            graph.erase_node(node)
    return graph, copies


DROPOUTS = [
    getattr(aten, f"{name}{place}").default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for place in ("", "_")
]


def _has_mode(node: fx.Node, kind: str, *targets: Any) -> bool:
    """Whether it is such an operation, and such a module's own: functions that users call keep what they were given."""
    return node.target in targets and _module_kind(node).startswith(f"{kind}.")


def _counts_batches(node: fx.Node) -> bool:
    return node.target == aten.add_.Tensor and not node.users and _module_kind(node).startswith(f"{NORM}.")


def _module_kind(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][1]) if stack else ""


def _set(node: fx.Node, place: int, value: bool) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])
