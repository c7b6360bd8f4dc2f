"""One walk over an exported graph that gives every value its channel ids (pass 1 of cutting).

The ids of a value are an int64 tensor of the value's own shape at batch LABEL_BATCH, mostly expanded views (stride 0
along everything but channels), so that an operation that moves elements can simply be run on the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from strata.core.errors import BadInput, one_line
from strata.graph.channels import ALWAYS, Channels, Ids
from strata.graph.values import concrete_size
from strata.ops import RuleFailed, Unsupported, operator_of
from strata.ops.channels import family

LABEL_BATCH = 2
LARGEST_FOLLOWER = 1 << 20  # elements of a parameter that may be labelled one by one


@dataclass(frozen=True)
class Source:
    """A weight whose output channels a cut may choose."""

    parameter: str
    dim: int
    ids: tuple[int, ...]  # one leaf per output channel; repeated within a group


@dataclass(frozen=True)
class Pinned:
    """An operation that Strata does not know: what meets there stays at full width."""

    op: str
    module: str
    source: str

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the model'} ({self.source or 'source unknown'})"


class Propagation:
    """Rules speak to this. Training and evaluation graph of one model go through the same instance."""

    def __init__(self, state_shapes: dict[str, tuple[int, ...]], parameters: Iterable[str]) -> None:
        self.channels = Channels()
        self.state_shapes = state_shapes
        self.parameters = frozenset(parameters)
        self.state_ids: dict[str, dict[int, Ids]] = {}
        self.sources: dict[str, Source] = {}
        self.source_nodes: dict[fx.Node, str] = {}
        self._chosen: dict[fx.Node, Ids] = {}  # what a source node's outputs are
        self.values: dict[fx.Node, Any] = {}
        self.required: dict[fx.Node, list[tuple[fx.Node, Tensor]]] = {}
        self.concatenations: list[Tensor] = []
        self.pinned: dict[Pinned, None] = {}
        self._followers: dict[str, Tensor] = {}
        self._follower_ids: set[int] = set()
        self._whole: set[str] = set()  # parameters and buffers that one of their uses keeps whole

    # --- walking -----------------------------------------------------------------------------------------------

    def walk(self, graph: fx.Graph, output: fx.Node) -> None:
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.label(node, None, None)
            elif node.op == "call_function":
                self.values[node] = self._visit(node)
        self.pin(output)

    def _visit(self, node: fx.Node) -> Any:
        if not holds_tensor(node.meta.get("val")):
            return self._scalar(node)
        if family(node) == "getitem":
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        rule = operator_of(node.target).channels
        if rule is None:
            return self._unknown(node)
        try:
            return rule(self, node)
        except Unsupported:
            return self._unknown(node)
        except BadInput:
            raise
        except Exception as error:
            where = _source_line(node) or "source unknown"
            message = f"the channel rule of {node.target} failed ({where}): {one_line(error, kind=True)}"
            raise RuleFailed(message) from error

    def _unknown(self, node: fx.Node) -> Any:
        inputs = self.tensor_inputs(node)
        loses = [x for x in inputs if self.is_state(x) or self.varying(self.labels(x))]
        if any(not self.is_state(x) or len(self.shape_of(x)) > 0 for x in loses):
            self.pinned[Pinned(str(node.target), _module(node), _source_line(node))] = None
        self.required.pop(node, None)  # what a rule said before it gave up
        for x in inputs:
            self.pin(x)
            if self.is_state(x) and str(x.target) in self.sources:
                self.channels.pin(self.sources[str(x.target)].ids)
        return self.label(node, None, None)

    def _scalar(self, node: fx.Node) -> Any:
        """A size computed from the batch, at LABEL_BATCH."""
        if family(node) == "sym_size":
            x: Any = node.args[0]
            dim: Any = node.args[1]
            return self.shape_of(x)[dim]
        target: Any = node.target
        return target(*[self.values[a] if isinstance(a, fx.Node) else a for a in node.args])

    def has_choice(self, node: fx.Node) -> bool:
        """Of a source node, once all is settled: whether a cut may choose among its outputs."""
        return node in self._chosen and bool((self.channels.canonical(self._chosen[node]) != ALWAYS).any())

    # --- what rules ask ----------------------------------------------------------------------------------------

    def is_state(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and x.op == "get_attr"

    def is_parameter(self, x: Any) -> bool:
        return self.is_state(x) and str(x.target) in self.parameters

    def shape_of(self, x: Any) -> tuple[int, ...]:
        if self.is_state(x):
            return self.state_shapes.get(str(x.target), tuple(x.meta["val"].shape) if "val" in x.meta else ())
        if x in self.values and isinstance(self.values[x], Tensor):
            return tuple(self.values[x].shape)
        return concrete_shape(x.meta["val"], LABEL_BATCH)

    def tensor_inputs(self, node: fx.Node) -> list[fx.Node]:
        return [x for x in node.all_input_nodes if x.op == "get_attr" or isinstance(self.values.get(x), Tensor)]

    def labels(self, x: Any) -> Tensor:
        if self.is_state(x):
            return self._follower(str(x.target), self.shape_of(x))
        value = self.values.get(x) if isinstance(x, fx.Node) else None
        if not isinstance(value, Tensor):
            raise Unsupported  # a number, or a list of tensors, where the rule takes a tensor
        return value

    def varying(self, labels: Tensor) -> list[int]:
        """Dims along which the ids differ."""
        if _constant(labels):
            return []
        small, dims = _squeezed(labels)
        canonical = self.channels.canonical(small)
        found = []
        for axis, dim in enumerate(dims):
            moved = np.moveaxis(canonical, axis, 0)
            if (moved != moved[:1]).any():
                found.append(dim)
        return found

    def along(self, x: Any, dim: int, tie: bool = True) -> Ids:
        """The ids along one dim; where they differ along other dims too, those are tied together (or refused)."""
        labels = self.labels(x)
        small, dims = _squeezed(labels, keep=dim)
        rows = np.moveaxis(self.channels.canonical(small), dims.index(dim), 0).reshape(labels.shape[dim], -1)
        if (rows != rows[:, :1]).any():
            if not tie:
                raise Unsupported
            for row in rows:
                self.channels.tie(np.unique(row).tolist())
        return self.channels.canonical(rows[:, 0])

    # --- what rules say ----------------------------------------------------------------------------------------

    def label(self, node: fx.Node, dim: int | None, ids: Ids | None) -> Any:
        """Ids that vary along one dim of the node's output (each output, if it has several), or along none."""
        value = node.meta["val"]
        if isinstance(value, (list, tuple)):
            return [_expanded(concrete_shape(v, LABEL_BATCH), dim, ids) for v in value]
        return _expanded(concrete_shape(value, LABEL_BATCH), dim, ids)

    def source(self, node: fx.Node, weight: Any, dim: int, groups: int = 0) -> Ids:
        if not self.is_parameter(weight):
            raise Unsupported  # a weight that is computed, or fixed
        name = str(weight.target)
        size = self.shape_of(weight)[dim]
        if name not in self.sources:
            leaves = np.array([ALWAYS]) if name in self._whole else self.channels.fresh(groups or size)
            ids = np.repeat(leaves, size // len(leaves))
            self.sources[name] = Source(name, dim, tuple(ids.tolist()))
        self.source_nodes[node] = name
        if self.sources[name].dim == dim:
            ids = np.array(self.sources[name].ids, dtype=np.int64)
        else:  # a table of embeddings that is the classifier too: only along one dim there is a choice
            ids = np.full(size, ALWAYS, dtype=np.int64)
        self._chosen[node] = ids
        if not groups:
            self.set_state(weight, dim, ids)
        return ids

    def fixed_source(self, node: fx.Node, weight: Any) -> None:
        """A layer whose outputs nobody can choose."""
        if not self.is_parameter(weight):
            raise Unsupported
        name = str(weight.target)
        self.sources.setdefault(name, Source(name, 0, (ALWAYS,) * self.shape_of(weight)[0]))
        self.channels.pin(self.sources[name].ids)
        self.pin(weight)
        self.source_nodes[node] = name

    def set_state(self, state: Any, dim: int, ids: Ids) -> None:
        """A parameter or buffer has these ids along one of its dims."""
        if not self.is_state(state):
            raise Unsupported
        name = str(state.target)
        if name in self._followers:
            self._bind_follower(name, dim, ids)
        if name in self._whole:
            self.channels.pin(np.unique(ids).tolist())
        known = self.state_ids.setdefault(name, {})
        if dim in known:  # another use of it, or seen in the other graph
            for a, b in zip(known[dim], ids, strict=True):
                self.channels.tie([int(a), int(b)])
        known[dim] = ids

    def require(self, node: fx.Node, x: Any, dim: int, ids: Ids) -> None:
        """The node's input x must be cut to these ids along dim."""
        if self.is_state(x):
            self.set_state(x, dim, ids)
        else:
            self.required.setdefault(node, []).append((x, _expanded(self.shape_of(x), dim, ids)))

    def meet(self, a: Ids, b: Ids) -> Ids:
        return self.channels.pairwise(a, b, self._meet_one)

    def join(self, node: fx.Node, inputs: Sequence[fx.Node], tie: bool = False, shape: Any = None) -> Tensor:
        """Broadcast the inputs together: an element exists where all of them do; parameters follow the values."""
        if shape is None:
            value = node.meta["val"]
            shape = concrete_shape(value[0] if isinstance(value, (list, tuple)) else value, LABEL_BATCH)
        values = [x for x in inputs if not self.is_state(x)]
        direct = [x for x in inputs if self.is_state(x) and values]
        met: Tensor | None = None
        try:
            expanded = [self.labels(x).expand(shape) for x in values or inputs]
        except RuntimeError as error:
            raise Unsupported from error  # not element by element
        self._tie_heads(expanded, [self.shape_of(x) for x in direct], len(shape))
        for labels in expanded:
            met = labels if met is None else self._join_two(met, labels, tie)
        if met is None:
            return _expanded(shape, None, None)
        for x in values:
            own = self.shape_of(x)
            back = _unbroadcast(met, own)
            if back is not None:
                self.required.setdefault(node, []).append((x, back))
        for state in direct:
            for dim, size in enumerate(self.shape_of(state)):
                out_dim = dim + len(shape) - len(self.shape_of(state))
                if size > 1 and out_dim in self.varying(met):
                    small, dims = _squeezed(met, keep=out_dim)
                    rows = np.moveaxis(small, dims.index(out_dim), 0).reshape(size, -1)
                    if (rows != rows[:, :1]).any():
                        raise Unsupported
                    self.set_state(state, dim, rows[:, 0].copy())
        is_list = isinstance(node.meta.get("val"), (list, tuple))
        return [met] * len(node.meta["val"]) if is_list else met  # type: ignore[return-value]

    def run(self, node: fx.Node) -> Any:
        """Do to the ids what the operation does to the values."""

        def value(x: Any) -> Any:
            if isinstance(x, fx.Node):
                return self.labels(x) if self.is_state(x) else self.values[x]
            if isinstance(x, (list, tuple)):
                return type(x)(value(item) for item in x)
            return x

        target: Any = node.target
        if family(node) in ("view", "_unsafe_view"):
            target = torch.ops.aten.reshape.default  # expanded ids have no view
        try:
            found = target(*value(tuple(node.args)), **{k: value(v) for k, v in node.kwargs.items()})
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise Unsupported from error  # the operation does more than to move elements
        several = isinstance(found, (list, tuple))
        expected = node.meta["val"] if several else [node.meta["val"]]
        shapes = [tuple(one.shape) for one in (found if several else [found])]
        if shapes != [concrete_shape(one, LABEL_BATCH) for one in expected]:
            raise Unsupported  # where to is itself said by a tensor
        return found

    def concatenated(self, labels: Tensor) -> None:
        self.concatenations.append(labels)

    def tie_groups(self, ids: Ids, groups: int) -> Ids:
        """Channels of one group are kept or dropped together; returns one id per group."""
        rows = ids.reshape(groups, -1)
        for row in rows:
            self.channels.tie(row.tolist())
        return self.channels.canonical(rows[:, 0])

    def tie_across(self, x: Any, dim: int) -> None:
        """All positions along dim are kept or dropped together."""
        small, dims = _squeezed(self.labels(x), keep=dim)
        columns = np.moveaxis(small, dims.index(dim), -1).reshape(-1, small.shape[dims.index(dim)])
        for column in np.unique(columns, axis=0):
            self.channels.tie(column.tolist())

    @staticmethod
    def repeat(ids: Ids, times: int) -> Ids:
        return np.repeat(ids, times)

    def pin(self, x: Any) -> None:
        if self.is_state(x):
            self._whole.add(str(x.target))
        if self.is_state(x) and x.target not in self._followers:
            for ids in self.state_ids.get(str(x.target), {}).values():
                self.channels.pin(np.unique(ids).tolist())
            return  # nothing labels it any more: it stays whole
        values = self.values.get(x) if not self.is_state(x) else self.labels(x)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, Tensor):
                self.channels.pin(np.unique(_squeezed(value)[0]).tolist())

    # --- afterwards --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make what a cut leaves of every value a rectangle: ids vary along one dim at most."""
        self._settle_rectangles()
        for source in self.sources.values():
            if len(set(self.channels.canonical(np.array(source.ids)).tolist())) == 1:
                self.channels.pin(source.ids)  # nothing to choose: it would only couple those that it meets
        self._settle_followers()

    def _settle_rectangles(self) -> None:
        tensors = [v for value in self.values.values() for v in (value if isinstance(value, list) else [value])]
        for labels in [*(t for t in tensors if isinstance(t, Tensor)), *self._followers.values()]:
            varying = self.varying(labels)
            if len(varying) < 2:
                continue
            self._tie_but(labels, max(varying, key=lambda d: (labels.shape[d], -d)))

    def _settle_followers(self) -> None:
        for name, labels in self._followers.items():
            for dim in self.varying(labels):
                small, dims = _squeezed(labels, keep=dim)
                ids = np.moveaxis(small, dims.index(dim), 0).reshape(labels.shape[dim], -1)[:, 0]
                self.state_ids.setdefault(name, {})[dim] = ids

    def vector(self, labels: Tensor) -> tuple[int, Ids] | None:
        """The one dim along which settled ids vary, and the ids there."""
        varying = self.varying(labels)
        if not varying:
            return None
        (dim,) = varying
        small, dims = _squeezed(labels, keep=dim)
        return dim, self.channels.canonical(np.moveaxis(small, dims.index(dim), 0).reshape(labels.shape[dim], -1)[:, 0])

    # --- inside ------------------------------------------------------------------------------------------------

    def _meet_one(self, a: int, b: int) -> int:
        a, b = self.channels.find(a), self.channels.find(b)
        if a == b:
            return a
        for follower, leader in ((a, b), (b, a)):
            if follower in self._follower_ids:
                self.channels.follow(follower, leader)
                return self.channels.find(leader)
        return self.channels.meet(a, b)

    def _tie_heads(self, operands: Sequence[Tensor], states: Sequence[tuple[int, ...]], rank: int) -> None:
        """What has one entry for each position within a head, whichever head (rotary positions, a norm of each head),
        does not say which heads there are: they are kept or dropped whole, and it stays whole."""
        alike = [labels for labels in operands if self._is_new(labels)]
        leading = [labels for labels in operands if not self._is_new(labels)]
        varying = {dim for labels in leading for dim in self.varying(labels)}
        within = {dim for labels in alike for dim in self.varying(labels)}
        within |= {dim + rank - len(s) for s in states for dim, size in enumerate(s) if size > 1} & varying
        heads = varying - within
        if not within or len(heads) != 1:
            return
        for labels in leading:
            self._tie_but(labels, *heads)
        for labels in alike:
            self.channels.pin(np.unique(_squeezed(labels)[0]).tolist())

    def _is_new(self, labels: Tensor) -> bool:
        """Of a parameter or constant that has met no value yet."""
        ids = np.unique(_squeezed(labels)[0]).tolist()
        return all(one in self._follower_ids and self.channels.find(one) == one for one in ids)

    def _tie_but(self, labels: Tensor, dim: int) -> None:
        """Ids vary along this dim alone."""
        small, dims = _squeezed(labels, keep=dim)
        for row in np.moveaxis(small, dims.index(dim), 0).reshape(labels.shape[dim], -1):
            self.channels.tie(np.unique(row).tolist())

    def _join_two(self, a: Tensor, b: Tensor, tie: bool) -> Tensor:
        if a is b or (_constant(b) and _first(b) == ALWAYS):
            return a
        if _constant(a) and _first(a) == ALWAYS:
            return b
        shape = a.shape
        index = tuple(
            slice(0, 1) if (a.stride(d) == 0 or s == 1) and (b.stride(d) == 0 or s == 1) else slice(None)
            for d, s in enumerate(shape)
        )
        left, right = a[index].numpy(), b[index].numpy()
        if tie:
            self.channels.pairwise(left, right, self._tie_one)
            return a
        return torch.from_numpy(self.meet(left, right)).expand(shape)

    def _tie_one(self, a: int, b: int) -> int:
        self.channels.tie([a, b])
        return a

    def _follower(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Ids for a parameter that is used like a value: they will be tied to what it meets."""
        if name not in self._followers:
            count = int(np.prod(shape))
            if count == 1 or count > LARGEST_FOLLOWER:  # a single number has nothing to cut: it goes with any channel
                self._followers[name] = _expanded(shape, None, None)
            else:
                ids = self.channels.fresh(count)
                self._follower_ids.update(ids.tolist())
                self._followers[name] = torch.from_numpy(ids).reshape(shape)
                for dim, known in self.state_ids.get(name, {}).items():
                    self._bind_follower(name, dim, known)
        return self._followers[name]

    def _bind_follower(self, name: str, dim: int, ids: Ids) -> None:
        rows = np.moveaxis(self._followers[name].numpy(), dim, 0).reshape(len(ids), -1)
        for row, leader in zip(rows, ids, strict=True):
            for follower in row:
                self.channels.follow(int(follower), int(leader))


def concrete_shape(value: Any, batch: int) -> tuple[int, ...]:
    return tuple(concrete_size(size, batch) for size in value.shape)


def _expanded(shape: Sequence[int], dim: int | None, ids: Ids | None) -> Tensor:
    if dim is None or ids is None:
        return torch.zeros((), dtype=torch.int64).expand(tuple(shape))
    view = [1] * len(shape)
    view[dim] = len(ids)
    return torch.from_numpy(np.ascontiguousarray(ids)).view(view).expand(tuple(shape))


def _squeezed(labels: Tensor, keep: int | None = None) -> tuple[np.ndarray, list[int]]:
    """Ids without the dims along which they are only repeated, and which dims are left."""
    index: list[Any] = []
    dims = []
    for dim, size in enumerate(labels.shape):
        if dim != keep and (size == 1 or labels.stride(dim) == 0):
            index.append(0)
        else:
            index.append(slice(None))
            dims.append(dim)
    return labels[tuple(index)].numpy(), dims


def _unbroadcast(labels: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    extra = labels.dim() - len(shape)
    index = (0,) * extra + tuple(slice(0, 1) if size == 1 else slice(None) for size in shape)
    return labels[index]


def _constant(labels: Tensor) -> bool:
    return all(size == 1 or stride == 0 for size, stride in zip(labels.shape, labels.stride(), strict=True))


def _first(labels: Tensor) -> int:
    return int(labels[(0,) * labels.dim()]) if labels.numel() else ALWAYS


def holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value))


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def _source_line(node: fx.Node) -> str:
    """The last line of the user's own code that led to this node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    own = [line for line in lines if "/torch/nn/" not in line] or lines
    if not own:
        return ""
    parts = own[-1].split('"')
    number = own[-1].split("line ")[-1].split(",")[0]
    return f"{parts[1]}:{number}" if len(parts) > 1 else own[-1]
