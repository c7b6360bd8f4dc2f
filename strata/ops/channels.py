"""What each operation does to channels: one rule per family of aten operations.

A rule gets the node and says, through `Propagation`, which ids its output has and to which ids its inputs must be cut.
How sizes inside the arguments change in a cut graph is said in resize.py, under the same families.
An operation without a rule pins its inputs at full width: correct, only less sliceable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from strata.graph.propagation import Propagation

FxNode = Any  # an fx.Node; fx types its arguments as a union of everything, which no rule could use
Rule = Callable[["Propagation", FxNode], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class Unsupported(Exception):
    """This use of the operation is outside its rule: treat it as unknown."""


def family(node: FxNode) -> str:
    """'conv2d' of aten.conv2d.default; '<operator>' names for Python's own operators."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return getattr(target, "__name__", str(target))


def argument(node: FxNode, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def named(node: FxNode, name: str, default: Any = None) -> Any:
    """An argument that has other places in other overloads."""
    names = [one.name for one in node.target._schema.arguments]
    return argument(node, names.index(name), name, default) if name in names else default


# Element by element, with broadcasting. Reductions that keep the dim (softmax) reduce over what is kept.
ELEMENTWISE = """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus softsign
    log_sigmoid threshold hardshrink softshrink softmax _softmax log_softmax _log_softmax
    add sub mul div rsub pow exp expm1 log log1p log2 sqrt rsqrt square neg abs sign reciprocal sin cos erf
    clamp clamp_min clamp_max
    maximum minimum where lerp addcmul addcdiv fmod remainder floor ceil round trunc floor_divide
    dropout feature_dropout alpha_dropout native_dropout bernoulli
    expand_as clone contiguous detach detach_ alias to _to_copy type_as float double half bfloat16 lift_fresh_copy
    zeros_like ones_like full_like empty_like rand_like randn_like masked_fill nan_to_num
    eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite bitwise_not
""".split()


@rule(*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE))
def elementwise(p: Propagation, node: FxNode) -> Tensor:
    inputs = [node.args[0]] if family(node) in ("type_as", "to") else p.tensor_inputs(node)  # x.to(y): y's type only
    return p.join(node, inputs, tie=_mutates_a_shared_value(node))


def _mutates_a_shared_value(node: FxNode) -> bool:
    """An in-place operation on a value that is read again later must not work on a cut copy of it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    mutated = node.args[0]
    return isinstance(mutated, fx.Node) and len(mutated.users) > 1


@rule("conv1d", "conv2d", "conv3d", "convolution")
def convolution(p: Propagation, node: FxNode) -> Tensor:
    name = family(node)
    if name == "convolution" and node.args[6]:
        raise Unsupported
    groups = node.args[8] if name == "convolution" else argument(node, 6, "groups", 1)
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    spatial = p.shape_of(weight)[2:]
    if len(p.shape_of(x)) != len(spatial) + 2 or not isinstance(groups, int):
        raise Unsupported  # unbatched, or a kernel of its own for each sample
    ids_in = p.along(x, 1)
    if p.is_state(weight) and not p.is_parameter(weight) and groups == len(ids_in):
        out = p.repeat(ids_in, p.shape_of(weight)[0] // groups)  # a fixed filter, on each channel alike
        p.set_state(weight, 0, out)
        p.require(node, x, 1, ids_in)
    elif groups == 1:
        out = p.source(node, weight, 0)
        p.set_state(weight, 1, ids_in)
        p.require(node, x, 1, ids_in)
    else:
        channels_in, channels_out = len(ids_in), p.shape_of(weight)[0]
        grouped = p.tie_groups(ids_in, groups)
        own = p.source(node, weight, 0, groups=groups)
        met = p.meet(grouped, own[:: channels_out // groups])
        out = p.repeat(met, channels_out // groups)
        p.set_state(weight, 0, out)
        p.require(node, x, 1, p.repeat(met, channels_in // groups))
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, 1, out)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(p: Propagation, node: FxNode) -> Tensor:
    if argument(node, 6, "groups", 1) != 1:
        raise Unsupported
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    ids_in = p.along(x, 1)
    out = p.source(node, weight, 1)
    p.set_state(weight, 0, ids_in)
    p.require(node, x, 1, ids_in)
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, 1, out)


@rule("linear")
def linear(p: Propagation, node: FxNode) -> Tensor:
    x, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
    last = len(p.shape_of(x)) - 1
    elsewhere = set(p.varying(p.labels(x))) - {last}
    if len(elsewhere) == 1 and last not in p.varying(p.labels(x)):
        p.fixed_source(node, weight)  # mixes another dim than the channels, e.g. tokens, in each channel alike
        (dim,) = elsewhere
        return p.label(node, dim, p.along(x, dim))
    if elsewhere:
        raise Unsupported
    ids_in = p.along(x, last)
    out = p.source(node, weight, 0)
    p.set_state(weight, 1, ids_in)
    p.require(node, x, last, ids_in)
    if bias is not None:
        p.set_state(bias, 0, out)
    return p.label(node, last, out)


@rule("embedding")
def embedding(p: Propagation, node: FxNode) -> Tensor:
    weight, index = node.args[0], node.args[1]
    p.pin(index)
    return p.label(node, len(p.shape_of(index)), p.source(node, weight, 1))


@rule("batch_norm", "instance_norm")
def batch_norm(p: Propagation, node: FxNode) -> Tensor:
    ids = p.along(node.args[0], 1)
    p.require(node, node.args[0], 1, ids)
    for state in node.args[1:5]:
        if state is not None:
            p.set_state(state, 0, ids)
    return p.label(node, 1, ids)


@rule("layer_norm", "rms_norm")
def layer_norm(p: Propagation, node: FxNode) -> Tensor:
    x, normalised = node.args[0], node.args[1]
    labels = p.labels(x)
    first = labels.dim() - len(normalised)
    for state in (argument(node, 2, "weight"), argument(node, 3, "bias") if family(node) == "layer_norm" else None):
        if state is not None:
            for dim in range(len(normalised)):
                p.set_state(state, dim, p.along(x, first + dim, tie=False))
    return labels


@rule("group_norm")
def group_norm(p: Propagation, node: FxNode) -> Tensor:
    x, groups = node.args[0], node.args[1]
    ids = p.along(x, 1)
    tied = p.repeat(p.tie_groups(ids, groups), len(ids) // groups)
    p.require(node, x, 1, tied)
    for state in (argument(node, 2, "weight"), argument(node, 3, "bias")):
        if state is not None:
            p.set_state(state, 0, tied)
    return p.label(node, 1, tied)


@rule("prelu")
def prelu(p: Propagation, node: FxNode) -> Tensor:
    x, slope = node.args[0], node.args[1]
    if p.shape_of(slope)[0] > 1:
        p.set_state(slope, 0, p.along(x, 1))
    return p.labels(x)


SPATIAL = """
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d lp_pool2d
    _adaptive_avg_pool2d _adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
""".split()


@rule(*SPATIAL)
def spatial(p: Propagation, node: FxNode) -> Any:
    x = node.args[0]
    name = family(node)
    dims = len(node.args[1]) // 2 if name == "pad" else next(int(c) for c in name if c.isdigit())
    if len(p.shape_of(x)) != dims + 2 or set(p.varying(p.labels(x))) - {1}:
        raise Unsupported
    return p.label(node, 1, p.along(x, 1))


@rule("constant_pad_nd", "pad")
def constant_pad(p: Propagation, node: FxNode) -> Tensor:
    if family(node) == "pad" and argument(node, 2, "mode", "constant") != "constant":
        return spatial(p, node)
    labels = p.labels(node.args[0])
    varying = p.varying(labels)
    pad = node.args[1]
    amounts = [(0, 0)] * labels.dim()
    for i in range(len(pad) // 2):
        amounts[labels.dim() - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    if any(not isinstance(a, int) or a < 0 for dim in varying for a in amounts[dim]) or len(varying) > 1:
        raise Unsupported
    if not varying:
        return p.label(node, None, None)
    # The zeros that are padded onto channels are always there; a cut further on drops what nobody needs.
    (dim,) = varying
    ids = torch.nn.functional.pad(torch.from_numpy(p.along(node.args[0], dim)), amounts[dim])
    return p.label(node, dim, ids.numpy())


# Operations that only move elements: what they do to a tensor they do to its ids.
MOVEMENT = """
    view reshape _unsafe_view flatten unflatten expand permute transpose t squeeze unsqueeze slice narrow
    chunk split split_with_sizes unsafe_chunk unsafe_split unbind movedim swapaxes numpy_T mT flip
    pixel_shuffle pixel_unshuffle repeat repeat_interleave
""".split()


@rule(*MOVEMENT)
def movement(p: Propagation, node: FxNode) -> Any:
    x = node.args[0]
    name = family(node)
    if name == "unbind" and argument(node, 1, "dim", 0) % len(p.shape_of(x)) in p.varying(p.labels(x)):
        # Whoever takes one element out needs it to be there; q, k, v stacked in one dim are tied instead.
        p.tie_across(x, argument(node, 1, "dim", 0) % len(p.shape_of(x)))
    return p.run(node)


@rule("select")
def select(p: Propagation, node: FxNode) -> Tensor:
    x, dim = node.args[0], node.args[1]
    dim %= len(p.shape_of(x))
    if dim in p.varying(p.labels(x)):
        p.tie_across(x, dim)
    return p.run(node)


@rule("cat", "concat", "concatenate")
def cat(p: Propagation, node: FxNode) -> Tensor:
    inputs = node.args[0]
    labels = [p.labels(x) for x in inputs]
    dim = argument(node, 1, "dim", 0) % labels[0].dim()
    others = {d for one in labels for d in p.varying(one)} - {dim}
    if others:
        # Side by side along another dim (a class token before patches): operands must agree in their channels.
        if len(others) > 1 or any(dim in p.varying(one) for one in labels):
            raise Unsupported
        (channel,) = others
        met = p.along(inputs[0], channel)
        for x in inputs[1:]:
            met = p.meet(met, p.along(x, channel))
        for x in inputs:
            p.require(node, x, channel, met)
        return p.label(node, channel, met)
    out = p.run(node)
    p.concatenations.append(out)
    return out


@rule("stack")
def stack(p: Propagation, node: FxNode) -> Tensor:
    inputs = node.args[0]
    dim = argument(node, 1, "dim", 0) % (p.labels(inputs[0]).dim() + 1)
    joined = p.join(node, list(inputs), shape=p.shape_of(inputs[0]))
    return joined.unsqueeze(dim).expand(p.shape_of(node))


REDUCTIONS = (
    "mean sum amax amin max min var std logsumexp norm linalg_vector_norm prod var_mean std_mean all any".split()
)


@rule(*REDUCTIONS)
def reduction(p: Propagation, node: FxNode) -> Any:
    x = node.args[0]
    if isinstance(argument(node, 1, "dim"), fx.Node):
        return elementwise(p, node)  # max(a, b)
    labels = p.labels(x)
    dims = named(node, "dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = list(range(labels.dim()))
    dims = [d % labels.dim() for d in ([dims] if isinstance(dims, int) else dims)]
    keepdim = named(node, "keepdim", False)
    varying = p.varying(labels)
    left = [d for d in varying if d not in dims]
    if not left:
        return p.label(node, None, None)  # reduced over the kept ones; the result is always there
    if len(left) > 1 or any(d in dims for d in varying):
        raise Unsupported
    (dim,) = left
    return p.label(node, dim if keepdim else dim - sum(d < dim for d in dims), p.along(x, dim))


@rule("scaled_dot_product_attention")
def attention(p: Propagation, node: FxNode) -> Tensor:
    """Cut by whole heads: dim -3 of q, k and v."""
    q, k, v = node.args[:3]
    mask = argument(node, 3, "attn_mask")
    head = len(p.shape_of(q)) - 3
    if head < 1 or len({p.shape_of(x)[head] for x in (q, k, v)}) > 1:
        raise Unsupported  # no head dim, or heads shared by several queries
    met = p.along(q, head)
    for x in (k, v):
        met = p.meet(met, p.along(x, head))
    for x in (q, k, v):
        p.require(node, x, head, met)
    if mask is not None:
        mask_head = len(p.shape_of(mask)) - 3
        if mask_head >= 0 and p.shape_of(mask)[mask_head] > 1:
            p.require(node, mask, mask_head, met)
    return p.label(node, head, met)


@rule("matmul", "bmm")
def matmul(p: Propagation, node: FxNode) -> Tensor:
    a, b = node.args[0], node.args[1]
    if p.is_state(a) or p.is_state(b):
        raise Unsupported
    rank = len(p.shape_of(a))
    if rank < 3 or len(p.shape_of(b)) != rank:
        raise Unsupported
    varying_a, varying_b = set(p.varying(p.labels(a))), set(p.varying(p.labels(b)))
    batch = {d for d in varying_a | varying_b if d < rank - 2}
    if len(batch) == 1:  # heads: what varies within a head is tied to it
        (head,) = batch
        if p.shape_of(a)[head] != p.shape_of(b)[head]:
            raise Unsupported  # one head of keys for all queries
        met = p.meet(p.along(a, head), p.along(b, head))
        p.require(node, a, head, met)
        p.require(node, b, head, met)
        return p.label(node, head, met)
    if batch:
        raise Unsupported
    met = p.meet(p.along(a, rank - 1, tie=False), p.along(b, rank - 2, tie=False))  # refuses all but summed channels
    p.require(node, a, rank - 1, met)
    p.require(node, b, rank - 2, met)
    return p.label(node, None, None)


@rule("zeros", "ones", "full", "arange", "empty", "rand", "randn", "eye", "linspace", "scalar_tensor", "new_zeros",
      "new_ones", "new_full", "new_empty")  # fmt: skip
def creation(p: Propagation, node: FxNode) -> Tensor:
    return p.label(node, None, None)
