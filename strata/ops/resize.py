"""How the sizes inside an operation's arguments change in a cut graph (pass 2 of cutting)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from strata.ops.channels import FxNode, argument, family

aten = torch.ops.aten


class Along(NamedTuple):
    """What a cut keeps of a value: a mask along its one channel dim."""

    dim: int
    mask: np.ndarray
    batched: bool  # the dim holds channels of all samples (batch x heads), so its size grows with the batch

    @property
    def whole(self) -> bool:
        return bool(self.mask.all())

    @property
    def kept(self) -> int:
        return int(self.mask.sum())

    @property
    def positions(self) -> np.ndarray:
        return np.flatnonzero(self.mask)


class Call(NamedTuple):
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Resize = Callable[[FxNode, Along | None, Along | None], Call]


def resize(node: FxNode, before: Along | None, after: Along | None) -> Call:
    """The node's call with sizes for what is kept of its first input (before, as cut for it) and output (after)."""
    name = family(node)
    if (before is None or before.whole) and (after is None or after.whole):
        return Call(node.target, node.args, dict(node.kwargs))
    change = _RESIZE.get(name)
    return change(node, before, after) if change else Call(node.target, node.args, dict(node.kwargs))


def _sizes(node: FxNode, before: Along | None, after: Along | None) -> Call:
    sizes = list(node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:])
    if after is not None and not after.whole:
        at = after.dim if family(node) != "unflatten" else None
        if at is not None and not (isinstance(sizes[at], int) and sizes[at] == -1):
            if after.batched:  # only the running batch knows this size, so another must not be left open
                known = node.meta["val"].shape
                sizes = [k if isinstance(s, int) and s == -1 else s for s, k in zip(sizes, known, strict=True)]
            sizes[at] = -1 if after.batched else after.kept
    return Call(node.target, (node.args[0], sizes), dict(node.kwargs))


def _unflatten(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim, sizes = node.args[1], list(node.args[2])
    if after is not None and not after.whole:
        rank = len(node.meta["val"].shape)
        first = dim % (rank - len(sizes) + 1)
        if 0 <= after.dim - first < len(sizes) and sizes[after.dim - first] != -1:
            sizes[after.dim - first] = after.kept
    return Call(node.target, (node.args[0], dim, sizes), dict(node.kwargs))


def _groups_of_convolution(node: FxNode, before: Along | None, after: Along | None) -> Call:
    position = 8 if family(node) == "convolution" else 6
    groups = argument(node, position, "groups", 1)
    if groups == 1 or before is None:
        return Call(node.target, node.args, dict(node.kwargs))
    kept = groups * before.kept // len(before.mask)
    if position < len(node.args):
        return Call(node.target, (*node.args[:position], kept, *node.args[position + 1 :]), dict(node.kwargs))
    return Call(node.target, node.args, {**node.kwargs, "groups": kept})


def _groups_of_norm(node: FxNode, before: Along | None, after: Along | None) -> Call:
    assert before is not None
    groups = node.args[1]
    kept = groups * before.kept // len(before.mask)
    return Call(node.target, (node.args[0], kept, *node.args[2:]), dict(node.kwargs))


def _normalised_shape(node: FxNode, before: Along | None, after: Along | None) -> Call:
    assert before is not None
    shape = node.args[1]
    sizes = list(shape)
    first = len(node.meta["val"].shape) - len(sizes)
    if before.dim >= first:
        sizes[before.dim - first] = before.kept
    return Call(node.target, (node.args[0], sizes, *node.args[2:]), dict(node.kwargs))


def _slice(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim = argument(node, 1, "dim", 0) % len(node.meta["val"].shape)
    if before is None or before.dim != dim:
        return Call(node.target, node.args, dict(node.kwargs))
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    chosen = np.zeros_like(before.mask)
    if family(node) == "narrow":
        start, stop, step = argument(node, 2, "start"), argument(node, 2, "start") + argument(node, 3, "length"), 1
    chosen[slice(start, stop, step)] = True
    return take(node.args[0], dim, np.flatnonzero(chosen[before.mask]))


def _squeeze(node: FxNode, before: Along | None, after: Along | None) -> Call:
    """Only what the full model squeezes: a channel that is left alone stays a dim."""
    if node.target is not aten.squeeze.default:
        return Call(node.target, node.args, dict(node.kwargs))
    dims = [dim for dim, size in enumerate(node.args[0].meta["val"].shape) if isinstance(size, int) and size == 1]
    return Call(aten.squeeze.dims, (node.args[0], dims), {})


def take(value: Any, dim: int, positions: np.ndarray) -> Call:
    """A view where the positions are evenly spaced, else a copy."""
    steps = np.diff(positions)
    if len(positions) == 1 or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 1
        return Call(aten.slice.Tensor, (value, dim, int(positions[0]), int(positions[-1]) + 1, step), {})
    return Call("index_select", (value, dim, tuple(positions.tolist())), {})


def _select(node: FxNode, before: Along | None, after: Along | None) -> Call:
    dim = node.args[1]
    index = node.args[2]
    rank = len(node.meta["val"].shape) + 1
    if before is None or before.dim != dim % rank:
        return Call(node.target, node.args, dict(node.kwargs))
    position = int(before.mask[: index % len(before.mask)].sum())
    return Call(node.target, (node.args[0], dim, position), dict(node.kwargs))


def _split(node: FxNode, before: Along | None, after: Along | None) -> Call:
    name = family(node)
    rank = len(node.meta["val"][0].shape)
    dim = argument(node, 2, "dim", 0) % rank
    if before is None or before.dim != dim:
        return Call(node.target, node.args, dict(node.kwargs))
    wanted = node.args[1]
    size = len(before.mask)
    if name.endswith("chunk"):
        wanted = -(-size // wanted)
    lengths = [min(wanted, size - at) for at in range(0, size, wanted)] if isinstance(wanted, int) else list(wanted)
    edges = np.cumsum([0, *lengths])
    kept = [int(before.mask[a:b].sum()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return Call(aten.split_with_sizes.default, (node.args[0], kept, dim), {})


_RESIZE: dict[str, Resize] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "expand"), _sizes),
    "unflatten": _unflatten,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _groups_of_convolution),
    "group_norm": _groups_of_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised_shape),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": _select,
    "squeeze": _squeeze,
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split"), _split),
}
