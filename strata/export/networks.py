"""A cut's network in operators that an exported step has: its training pass, evaluation, and batch norm statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from strata.export.operators import ops
from strata.graph.batch_norms import MEAN, VARIANCE

aten = torch.ops.aten
WHOLE = 2**63 - 1  # to the end, as torch writes x[:]
Rewrite = Callable[["Rewriting", fx.Node], "fx.Node | None"]  # what takes the node's place; None: it stays


class Rewriting:
    """A copy of a network's graph, under way."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(graph, {}))
        self.dropouts = 0
        self.statistics: dict[str, fx.Node] = {}  # by the buffer's name: what takes its place

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def item(self, node: fx.Node, number: int) -> fx.Node:
        return self.call(_item, node, number)

    def apply(self, rules: dict[Any, Rewrite]) -> None:
        for node in list(self.graph.nodes):
            rule = rules.get(node.target) if node.op == "call_function" else None
            if rule is None:
                continue
            with self.graph.inserting_after(node):
                anchor = self.graph.call_function(_item, (node, 0))  # keeps the order of what the rule inserts
            with self.graph.inserting_before(anchor):
                made = rule(self, node)
            self.graph.erase_node(anchor)
            if made is not None:
                self._replace(node, made)

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        if node._erased:
            return
        if _writes(node):  # later uses of what it wrote to see the result
            written, passed = node.args[0], False
            for other in list(self.graph.nodes):
                passed = passed or other is made
                if passed and other is not made and isinstance(written, fx.Node):
                    other.replace_input_with(written, made)
        self.graph.erase_node(node)

    def cleaned(self) -> fx.Graph:
        """Without what no result needs: counters of batches, running statistics."""
        for node in reversed(list(self.graph.nodes)):
            counts = node.op == "call_function" and node.target is aten.add_.Tensor and node.args[0].op == "get_attr"
            if not node.users and (counts or node.op == "get_attr" or _is_pure(node)):
                self.graph.erase_node(node)
        return self.graph


def _item(values: Any, number: int) -> Any:
    return values[number]


def _writes(node: fx.Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.endswith("_") and not name.endswith("__")


def _is_pure(node: fx.Node) -> bool:
    return node.op == "call_function" and not _writes(node)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _pair(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _is_view(node: Any) -> bool:
    """Whether writing to it would write to something else."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema is not None and any(one.alias_info is not None for one in schema.returns) and not _writes(node)


# --- rules -------------------------------------------------------------------------------------------------------


def _conv2d(new: Rewriting, node: fx.Node) -> fx.Node | None:
    x, w = node.args[:2]
    padding = _argument(node, 4, "padding", 0)
    if isinstance(padding, str):
        return None
    bias, stride = _argument(node, 2, "bias", None), _argument(node, 3, "stride", 1)
    dilation, groups = _argument(node, 5, "dilation", 1), _argument(node, 6, "groups", 1)
    return new.call(ops.conv2d.default, x, w, bias, _pair(stride), _pair(padding), _pair(dilation), groups)


def _linear(new: Rewriting, node: fx.Node) -> fx.Node:
    return new.call(ops.linear.default, *node.args[:2], _argument(node, 2, "bias", None))


def _relu(new: Rewriting, node: fx.Node) -> fx.Node | None:
    return None if _writes(node) and _is_view(node.args[0]) else new.call(ops.relu.default, node.args[0])


def _hardtanh(new: Rewriting, node: fx.Node) -> fx.Node | None:
    low, high = _argument(node, 1, "min_val", -1.0), _argument(node, 2, "max_val", 1.0)
    if _writes(node) and _is_view(node.args[0]):
        return None
    return new.call(ops.clamp.default, node.args[0], float(low), float(high))


def _relu6(new: Rewriting, node: fx.Node) -> fx.Node | None:
    if _writes(node) and _is_view(node.args[0]):
        return None
    return new.call(ops.clamp.default, node.args[0], 0.0, 6.0)


def _batch_norm(new: Rewriting, node: fx.Node) -> fx.Node:
    """In training: of the batch, unless its statistics are fixed."""
    x, w, b, mean, var, training, _, eps, _ = node.args
    if training:
        return new.item(new.call(ops.batch_norm.default, x, w, b, eps), 0)
    return new.call(ops.normalise.default, x, w, b, mean, var, eps)


def _measured_batch_norm(new: Rewriting, node: fx.Node) -> fx.Node:
    """In evaluation, with the batch's statistics, which are results of their own."""
    x, w, b, mean, var, _, _, eps, _ = node.args
    made = new.call(ops.batch_norm_statistics.default, x, w, b, eps)
    out = new.item(made, 0)
    for number, buffer in ((1, mean), (2, var)):
        if isinstance(buffer, fx.Node):
            new.statistics[str(buffer.target)] = new.item(made, number)
    return out


def _avg_pool2d(new: Rewriting, node: fx.Node) -> fx.Node | None:
    kernel = _pair(node.args[1])
    stride, padding = _argument(node, 2, "stride", ()), _argument(node, 3, "padding", 0)
    if _argument(node, 4, "ceil_mode", False) or _argument(node, 6, "divisor_override", None) is not None:
        return None
    counts = _argument(node, 5, "count_include_pad", True)
    stride = _pair(stride) if stride else kernel
    return new.call(ops.avg_pool2d.default, node.args[0], kernel, stride, _pair(padding), counts)


def _max_pool2d(new: Rewriting, node: fx.Node) -> fx.Node | None:
    kernel = _pair(node.args[1])
    stride, padding = _argument(node, 2, "stride", ()), _argument(node, 3, "padding", 0)
    if _argument(node, 5, "ceil_mode", False):
        return None
    dilation = _pair(_argument(node, 4, "dilation", 1))
    stride = _pair(stride) if stride else kernel
    made = new.call(ops.max_pool2d.default, node.args[0], kernel, stride, _pair(padding), dilation)
    return new.item(made, 0)


def _adaptive_avg_pool2d(new: Rewriting, node: fx.Node) -> fx.Node | None:
    if _pair(node.args[1]) != [1, 1]:
        return None
    pooled = new.call(ops.spatial_mean.default, node.args[0])
    return new.call(aten.unsqueeze.default, new.call(aten.unsqueeze.default, pooled, 2), 3)


def _dropout(new: Rewriting, node: fx.Node) -> fx.Node:
    arguments: tuple[Any, ...] = node.args
    x, p, training = arguments
    if not training or not p:
        return x
    mask = new.call(ops.dropout_mask.default, x, float(p), new.dropouts)
    new.dropouts += 1
    return new.call(aten.mul.Tensor, x, mask)


def _gelu(new: Rewriting, node: fx.Node) -> fx.Node:
    return new.call(ops.gelu.default, node.args[0], _argument(node, 1, "approximate", "none") == "tanh")


def _silu(new: Rewriting, node: fx.Node) -> fx.Node | None:
    return None if _writes(node) and _is_view(node.args[0]) else new.call(ops.silu.default, node.args[0])


def _softmax(new: Rewriting, node: fx.Node) -> fx.Node | None:
    last = _shape(node.args[0])
    if last is None or node.args[1] not in (-1, len(last) - 1) or _argument(node, 2, "dtype", None) is not None:
        return None
    return new.call(ops.softmax.default, _contiguous(new, node.args[0]))


def _layer_norm(new: Rewriting, node: fx.Node) -> fx.Node:
    arguments: tuple[Any, ...] = node.args
    x, shape = arguments[:2]
    w, b = _argument(node, 2, "weight", None), _argument(node, 3, "bias", None)
    eps = _argument(node, 4, "eps", 1e-5)
    return new.item(new.call(ops.layer_norm.default, _contiguous(new, x), w, b, math.prod(shape), eps), 0)


def _slice(new: Rewriting, node: fx.Node) -> fx.Node | None:
    arguments = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    return None if node.kwargs or _is_written(node) else new.call(sliced, node.args[0], *arguments)


def _select(new: Rewriting, node: fx.Node) -> fx.Node | None:
    return None if node.kwargs or _is_written(node) else new.call(selected, *node.args)


def _is_written(node: fx.Node) -> bool:
    """Whether something may write to what it takes a part of, or to that part: then it has to stay a view."""
    source = node.args[0]
    users = [*node.users, *(source.users if isinstance(source, fx.Node) else ())]
    return any(_writes(user) or _is_view(user) and any(map(_writes, user.users)) for user in users)


def sliced(x: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    dim = dim % x.dim()
    size = x.shape[dim]
    if start in (None, 0) and end in (None, WHOLE) and step == 1:
        return x
    if dim == 0 or not isinstance(size, int):  # samples, of which there may be any number
        return aten.slice(x, dim, start, end, step)
    first, last, step = slice(start, end, step).indices(size)
    if (first, last, step) == (0, size, 1):
        return x
    return ops.slice(x.contiguous(), dim, first, last, step) if first < last else aten.slice(x, dim, start, end, step)


def selected(x: Tensor, dim: int, index: int) -> Tensor:
    dim = dim % x.dim()
    size = x.shape[dim]
    if dim == 0 or not isinstance(size, int):
        return aten.select(x, dim, index)
    index = index % size
    return ops.slice(x.contiguous(), dim, index, index + 1, 1).squeeze(dim)


def _shape(node: Any) -> Any:
    value = getattr(node, "meta", {}).get("val")
    return None if value is None else value.shape


def _contiguous(new: Rewriting, node: Any) -> fx.Node:
    """Kernels of ours take elements one after another."""
    return new.call(aten.contiguous.default, node)


def _attention(new: Rewriting, node: fx.Node) -> fx.Node | None:
    """By the kernel; with dropout or a mask that is learned in plain products."""
    query, key, value = node.args[:3]
    mask, dropout = _argument(node, 3, "attn_mask", None), _argument(node, 4, "dropout_p", 0.0)
    causal, scale = _argument(node, 5, "is_causal", False), node.kwargs.get("scale")
    if node.kwargs.get("enable_gqa"):
        return None
    if not dropout:
        return new.call(plain_attention, query, key, value, mask, causal, scale)
    weights = new.call(attention_weights, query, key, mask, causal, scale)
    drawn = new.call(ops.dropout_mask.default, weights, float(dropout), new.dropouts)
    new.dropouts += 1
    return new.call(aten.matmul.default, new.call(aten.mul.Tensor, weights, drawn), value)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    if mask is not None and (mask.requires_grad or mask.dtype not in (torch.bool, torch.float32)):
        return attention_weights(query, key, mask, causal, scale) @ value
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    seen = None if mask is None else mask.contiguous()
    return ops.attention(query.contiguous(), key.contiguous(), value.contiguous(), seen, causal, factor)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """[..., queries, keys], rows that sum to one."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        scores = torch.where(seen, scores, float("-inf"))
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


RULES: dict[Any, Rewrite] = {
    aten.conv2d.default: _conv2d,
    aten.conv2d.padding: _conv2d,
    aten.linear.default: _linear,
    aten.relu.default: _relu,
    aten.relu_.default: _relu,
    aten.relu6.default: _relu6,
    aten.relu6_.default: _relu6,
    aten.hardtanh.default: _hardtanh,
    aten.hardtanh_.default: _hardtanh,
    aten.batch_norm.default: _batch_norm,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.max_pool2d.default: _max_pool2d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.gelu.default: _gelu,
    aten.silu.default: _silu,
    aten.silu_.default: _silu,
    aten.softmax.int: _softmax,
    aten.layer_norm.default: _layer_norm,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
}
MEASURED = {**RULES, aten.batch_norm.default: _measured_batch_norm}


# --- networks ----------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Runs a graph node by node: what is traced then knows the line of the user's code that it comes from."""

    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        return fx.Interpreter(self.network).run(*inputs)


class TrainingPass(Network):
    """Inputs and labels to the mean cross-entropy."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        loss, _ = ops.cross_entropy(super().forward(x), labels)
        return loss


class EvaluationPass(Network):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


def plain_network(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Scores; in evaluation with the statistics that the buffers hold."""
    new = Rewriting(graph)
    new.apply(RULES)
    return fx.GraphModule(root, new.cleaned())


def measuring_network(root: nn.Module, graph: fx.Graph, buffers: Sequence[str]) -> fx.GraphModule:
    """Scores with each batch's own statistics, and these, in the order of `buffers`."""
    new = Rewriting(graph)
    new.apply(MEASURED)
    (output,) = (node for node in new.graph.nodes if node.op == "output")
    output.args = ((output.args[0], *(new.statistics[name] for name in buffers)),)
    return fx.GraphModule(root, new.cleaned())


def statistics_of(graph: fx.Graph) -> list[str]:
    """The buffers that hold running statistics, in the order of their norms: each norm's mean, then its variance."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.batch_norm.default:
            found |= dict.fromkeys(_names(node.args[MEAN : VARIANCE + 1]))
    return list(found)


def _names(arguments: Iterable[Any]) -> list[str]:
    return [str(one.target) for one in arguments if isinstance(one, fx.Node) and one.op == "get_attr"]
