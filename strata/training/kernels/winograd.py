"""conv2d for wide networks: the usual 3x3 convolutions by winograd.c, all others by torch.

Twice as quick as torch's (which run near the peak of the processor, but multiply four times as often), at about one
more digit of rounding.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from strata.training.kernels.library import LANES, loaded, pointer, require

aten = torch.ops.aten
TILE = 4  # rows and columns of the output that are computed together
# Beyond these torch's are quicker: positions in whole tiles over those in the map, tiles in all (few do not pay for
# transforming the weights, the less so the more channels there are), and weights per tap (they no longer fit a cache).
MOST_WASTE = 1.6
FEWEST_TILES = 12
CHANNELS_PER_TILE = 4
MOST_WEIGHTS = 512 * 512


class _Kept(threading.local):
    room: Tensor | None = None  # for what lies between the stages of a convolution
    modes = 0  # that are entered


_kept = _Kept()


def own_convolutions(wanted: bool | None) -> AbstractContextManager[object]:
    """Within it the convolutions of submodels are computed by `conv2d` below, if wanted."""
    if not wanted:
        return nullcontext()
    require()
    return _OwnConvolutions()


def in_use() -> bool:
    """Whether this is within `own_convolutions`. A backward pass leaves it, as torch does with all such modes."""
    return _kept.modes > 0


class _OwnConvolutions(TorchFunctionMode):
    def __enter__(self) -> Any:
        entered = super().__enter__()
        _kept.modes += 1
        return entered

    def __exit__(self, *error: Any) -> None:
        _kept.modes -= 1
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (conv2d if func is aten.conv2d.default else func)(*args, **(kwargs or {}))


def conv2d(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """As aten.conv2d. Which of the two computes it follows from shapes and layout alone."""
    usual = bias is None and list(stride) == [1, 1] and list(padding) == [1, 1] and list(dilation) == [1, 1]
    if not (usual and groups == 1 and weights.shape[2:] == (3, 3) and _fits(x, weights)):
        result: Tensor = aten.conv2d.default(x, weights, bias, stride, padding, dilation, groups)
    else:
        result = Winograd.apply(x, weights)
    return result


class Winograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return _convolved(x, weights, weights.shape[0], flipped=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weights = ctx.saved_tensors
        above = gradients[0].contiguous(memory_format=torch.channels_last)
        of_x = of_weights = None
        if ctx.needs_input_grad[0]:  # the kernel turned around, and channels in and out exchanged
            of_x = _convolved(above, weights, weights.shape[1], flipped=True)
        if ctx.needs_input_grad[1]:
            of_weights = _weight_gradient(x, above, weights)
        return of_x, of_weights


def _fits(x: Tensor, weights: Tensor) -> bool:
    if not (x.dim() == 4 and x.dtype == weights.dtype == torch.float32 and x.device.type == "cpu"):
        return False
    batch, channels, height, width = x.shape
    out = weights.shape[0]
    if channels != weights.shape[1]:  # torch says what is wrong
        return False
    of_image = -(-height // TILE) * -(-width // TILE)
    enough = batch * of_image >= max(FEWEST_TILES, max(out, channels) / CHANNELS_PER_TILE)
    pays = enough and of_image * TILE * TILE <= MOST_WASTE * height * width and out * channels <= MOST_WEIGHTS
    return pays and min(out, channels) >= LANES and x.is_contiguous(memory_format=torch.channels_last)


def _convolved(x: Tensor, weights: Tensor, out: int, flipped: bool) -> Tensor:
    batch, channels, height, width = x.shape
    result = torch.empty((batch, out, height, width), dtype=torch.float32, memory_format=torch.channels_last)
    of_out, of_in, of_row, of_column = weights.stride()
    strides = (of_in, of_out, of_row, of_column) if flipped else (of_out, of_in, of_row, of_column)
    loaded().winograd(
        pointer(result),
        pointer(x),
        pointer(weights),
        pointer(_room(channels, out)),
        (ctypes.c_long * 4)(*strides),
        int(flipped),
        (ctypes.c_int * 5)(batch, height, width, channels, out),
    )
    return result


def _weight_gradient(x: Tensor, above: Tensor, weights: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    out = above.shape[1]
    result = torch.empty_like(weights)
    loaded().winograd_weight_gradient(
        pointer(result),
        pointer(x),
        pointer(above),
        pointer(_room(channels, out)),
        (ctypes.c_long * 4)(*result.stride()),
        (ctypes.c_int * 5)(batch, height, width, channels, out),
    )
    return result


def _room(channels: int, out: int) -> Tensor:
    size = loaded().winograd_room(channels, out)
    if _kept.room is None or _kept.room.numel() < size:
        _kept.room = torch.empty(size, dtype=torch.float32)
    return _kept.room
