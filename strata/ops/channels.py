"""What a channel rule is written in: the node it gets, and the walk over the graph that it asks and tells.

The elements of every tensor carry ids: elements with the same id are kept or dropped together. A rule says which ids
the output of its operation has, and to which ids its inputs must be cut. `channels=` of an `Operator` is such a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx

FxNode = Any  # an fx.Node; fx types its arguments as a union of everything, which no rule could use
Ids = np.ndarray  # int64, one per channel
Rule = Callable[["Walk", FxNode], Any]  # the labels of the output: a Tensor, or a list of them


class Unsupported(Exception):
    """This use of the operation is outside its rule: treat it as unknown, so that what meets there stays whole.

    Every other exception in a rule is a mistake in the rule, and shows as one."""


class RuleFailed(Exception):
    """A rule has a mistake; says of which operator. What went wrong is its cause."""


class Walk(Protocol):
    """What a rule may ask of the walk over a graph, and tell it. The walk itself is strata.graph's.

    *Labels* are the ids of a whole value: an int64 tensor of its shape (at a batch of 2), most of it repeated.
    *Ids* are those along one dim. Id 0 is always there. `x` and `weight` are nodes, as in `node.args`."""

    # asking

    def is_state(self, x: Any) -> bool:
        """A parameter or buffer, not a value that is computed."""
        ...

    def is_parameter(self, x: Any) -> bool: ...

    def shape_of(self, x: Any) -> tuple[int, ...]: ...

    def tensor_inputs(self, node: FxNode) -> list[fx.Node]: ...

    def labels(self, x: Any) -> Tensor: ...

    def varying(self, labels: Tensor) -> list[int]:
        """The dims along which ids differ: mostly the one of the channels, or none."""
        ...

    def along(self, x: Any, dim: int, tie: bool = True) -> Ids:
        """The ids along one dim. Where they differ along other dims too, those are tied, or refused without `tie`."""
        ...

    # saying

    def label(self, node: FxNode, dim: int | None, ids: Ids | None) -> Any:
        """Labels for the node's output: these ids along dim, repeated along all others. None: nothing to cut."""
        ...

    def source(self, node: FxNode, weight: Any, dim: int, groups: int = 0) -> Ids:
        """The node's outputs are chosen here: fresh ids, one per size of dim of the weight (or one per group)."""
        ...

    def fixed_source(self, node: FxNode, weight: Any) -> None:
        """The node is a layer, but its outputs cannot be chosen."""
        ...

    def set_state(self, state: Any, dim: int, ids: Ids) -> None:
        """A parameter or buffer has these ids along dim: it is cut like them."""
        ...

    def require(self, node: FxNode, x: Any, dim: int, ids: Ids) -> None:
        """The node's input x must be cut to these ids along dim."""
        ...

    def meet(self, a: Ids, b: Ids) -> Ids:
        """Ids that exist where both do."""
        ...

    def join(self, node: FxNode, inputs: Sequence[fx.Node], tie: bool = False, shape: Any = None) -> Tensor:
        """Broadcast the inputs together: an element exists where it does in all. Cuts the inputs to that, too."""
        ...

    def run(self, node: FxNode) -> Any:
        """Do to the labels what the operation does to the values: for operations that only move elements."""
        ...

    def concatenated(self, labels: Tensor) -> None:
        """These channels stand side by side: prefixes of them are counted together."""
        ...

    def tie_groups(self, ids: Ids, groups: int) -> Ids:
        """Channels of one group are kept or dropped together; one id per group."""
        ...

    def tie_across(self, x: Any, dim: int) -> None:
        """All positions along dim are kept or dropped together."""
        ...

    def repeat(self, ids: Ids, times: int) -> Ids:
        """Each id this many times, one after the other."""
        ...

    def pin(self, x: Any) -> None:
        """All of x is always there."""
        ...


# --- reading a node ----------------------------------------------------------------------------------------------


def name_of(target: Any) -> str:
    """'conv2d' of aten.conv2d.padding, 'mylib::scale' of another library's; of Python's own operators their name."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return getattr(target, "__name__", str(target))


def family(node: FxNode) -> str:
    return name_of(node.target)


def argument(node: FxNode, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def named(node: FxNode, name: str, default: Any = None) -> Any:
    """An argument that has other places in other overloads."""
    names = [one.name for one in node.target._schema.arguments]
    return argument(node, names.index(name), name, default) if name in names else default


# --- rules for many families -------------------------------------------------------------------------------------


def elementwise(p: Walk, node: FxNode) -> Tensor:
    """Element by element, with broadcasting."""
    return p.join(node, p.tensor_inputs(node), tie=_mutates_a_shared_value(node))


def like_first(p: Walk, node: FxNode) -> Tensor:
    """Element by element; of further tensors only the type or the shape counts."""
    return p.join(node, [node.args[0]], tie=_mutates_a_shared_value(node))


def _mutates_a_shared_value(node: FxNode) -> bool:
    """An in-place operation on a value that is read again later must not work on a cut copy of it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    mutated = node.args[0]
    return isinstance(mutated, fx.Node) and len(mutated.users) > 1


def always_there(p: Walk, node: FxNode) -> Any:
    """The output has no channels."""
    return p.label(node, None, None)
