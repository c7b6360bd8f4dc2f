"""FLOPs per sample of a cut, and the bytes that a device sends and receives.

Two per multiply-add of convolutions, linear layers and matrix products; norms and activations are not counted. Training
adds the same again for the gradient of the weight (if it is trained) and of the input (if that needs one). Plans and
metrics show `real_train`, which is docs/method.md's formula.

`forward` and `train` are what torch's FlopCounterMode counts on a CPU for one training step, divided by the batch. It
is off in two places, and `real_*` are corrected for both: it does not see the fused attention kernel of the CPU
(`attention_*`, counted here by torch's own formula for the GPU's kernels), and for the weight gradient of a grouped
convolution it counts as if there were no groups (`grouped_excess`).

In closed form for the operators of most networks (strata.ops); others (a recurrent layer, einsum) are run on fake
tensors, which have sizes but no memory, and FlopCounterMode watches. Of an LSTM it sees nothing: the CPU's kernel for
it is fused too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from strata.ops.flops import Count, counted
from strata.ops.sized import Ref, SizedOp

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

BATCH = 2  # any would do: everything is linear in it
_KNOWN: dict[Any, Count] = {}  # calls that were watched
_WITHOUT_PRODUCTS: set[Any] = set()  # operators in which there was nothing to count: asked of each once


@dataclass(frozen=True)
class Flops:
    """Per sample."""

    forward: int
    train: int
    attention_forward: int = 0
    attention_train: int = 0
    grouped_excess: int = 0
    recomputed: int = 0  # forward, that backward repeats: neither in `forward` nor in `train`

    @property
    def real_forward(self) -> int:
        return self.forward + self.attention_forward

    @property
    def real_train(self) -> int:
        return self.train + self.attention_train - self.grouped_excess + self.recomputed


@dataclass(frozen=True)
class Traffic:
    """Bytes per device and round. What a device already has is known to the caller, not here."""

    upload: int  # trained parameters
    download: int  # all parameters of the cut


def flops_of_pass(graph: ChannelGraph, cut: Cut) -> Flops:
    """One forward and one backward pass."""
    columns = zip(*(count for _, count in _counted(graph, cut)), strict=True)
    return Flops(*(sum(column) // BATCH for column in columns))


def forward_by_operation(graph: ChannelGraph, cut: Cut) -> list[int]:
    """Forward FLOPs per sample of each operation, in the order of the submodel's training graph."""
    return [
        (count.forward + count.attention_forward) // BATCH
        for op, count in _counted(graph, cut)
        if op.kind == "op" or op.kind == "cut"
    ]


def _counted(graph: ChannelGraph, cut: Cut) -> Iterator[tuple[SizedOp, Count]]:
    ops = graph.sized(cut, BATCH)
    by_name = {op.name: op for op in ops}
    for op in ops:
        found = counted(op, [by_name[a.name] if isinstance(a, Ref) else a for a in op.args])
        yield op, _watched(op, by_name) if found is None else found


def traffic(graph: ChannelGraph, cut: Cut) -> Traffic:
    def size(names: Any) -> int:
        return sum(prod(cut.shapes[name]) * graph.state_dtypes[name].itemsize for name in names)

    return Traffic(upload=size(cut.trained), download=size(cut.parameters))


def _watched(op: SizedOp, by_name: Mapping[str, SizedOp]) -> Count:
    """What FlopCounterMode sees in an operator that has no rule."""
    if not isinstance(op.target, torch._ops.OpOverload) or op.target._schema.is_mutable:
        return Count()
    kind = (op.target, *(a for a in op.args if isinstance(a, str)))  # einsum multiplies or not, by its equation
    if kind in _WITHOUT_PRODUCTS:
        return Count()
    inputs = [by_name[name] for name in op.inputs]
    if any(not isinstance(x.shape, tuple) for x in inputs):
        return Count()  # it depends on a size, as a view may
    key = (*kind, repr((op.args, op.kwargs)), *((x.shape, x.dtype, x.requires_grad) for x in inputs))
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _count_on_fake_tensors(op, inputs)
        except Exception:  # fake tensors cannot do everything; FlopCounterMode passes over what it does not know, too
            _KNOWN[key] = Count()
    if not _KNOWN[key].forward:
        _WITHOUT_PRODUCTS.add(kind)
    return _KNOWN[key]


def _count_on_fake_tensors(op: SizedOp, inputs: Sequence[SizedOp]) -> Count:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        tensors = {x.name: torch.empty(x.shape, dtype=x.dtype, requires_grad=x.requires_grad) for x in inputs}
        arguments = pytree.tree_map(
            lambda a: tensors[a.name] if isinstance(a, Ref) else a, (op.args, op.kwargs), is_leaf=_is_ref
        )
        results = pytree.tree_leaves(op.target(*arguments[0], **arguments[1]))
        forward = counter.get_total_flops()
        results = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.empty_like(one) for one in results])
        return Count(forward, counter.get_total_flops())


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)
