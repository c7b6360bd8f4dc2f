"""Convolutions of several narrow networks side by side (narrow.c)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strata.training.kernels.library import loaded, pointer


class Convolution(torch.autograd.Function):
    """input [networks, in, h, w, batch], weights [networks, out, in, kh, kw] -> [networks, out, h', w', batch]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, stride: int, padding: int) -> Tensor:
        _check(x, weights, stride, padding)
        x, weights = x.contiguous(), weights.contiguous()
        networks, channels, height, width, batch = x.shape
        out, kernel_h, kernel_w = weights.shape[1], *weights.shape[3:]
        out_h, out_w = ((s + 2 * padding - k) // stride + 1 for s, k in ((height, kernel_h), (width, kernel_w)))
        shape = (networks, channels, height, width, out, out_h, out_w, batch, kernel_h, kernel_w, stride, padding)
        output = x.new_empty(networks, out, out_h, out_w, batch)
        _call("forward", output, x, weights, shape)
        ctx.save_for_backward(x, weights)
        ctx.shape = shape
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights = ctx.saved_tensors
        above = gradients[0].contiguous()
        of_x = of_weights = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            _call("input_gradient", of_x, above, weights, ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weights = torch.empty_like(weights)
            _call("weight_gradient", of_weights, above, x, ctx.shape)
        return of_x, of_weights, None, None


def convolution(x: Tensor, weights: Tensor, stride: int, padding: int) -> Tensor:
    result: Tensor = Convolution.apply(x, weights, stride, padding)
    return result


def _check(x: Tensor, weights: Tensor, stride: int, padding: int) -> None:
    """C takes them as they are said to be."""
    if x.dim() != 5 or weights.dim() != 5 or not x.device.type == weights.device.type == "cpu":
        raise ValueError("a convolution is of [networks, in, h, w, batch] by [networks, out, in, kh, kw] on the CPU")
    if not x.dtype == weights.dtype == torch.float32:
        raise TypeError(f"a convolution of float32, not of {x.dtype} by {weights.dtype}")
    if (x.shape[0], x.shape[1]) != (weights.shape[0], weights.shape[2]):
        raise ValueError(f"a convolution of {list(x.shape)} by {list(weights.shape)}: networks or channels differ")
    lanes = loaded().narrow_lanes()
    if x.shape[4] % lanes:  # the last register would reach beyond the end
        raise ValueError(f"a batch of {x.shape[4]} samples: it has to be a multiple of {lanes} here")
    empty = any(s + 2 * padding < k for s, k in zip(x.shape[2:4], weights.shape[3:], strict=True))
    if stride < 1 or padding < 0 or empty:
        how = f"stride {stride}, padding {padding}"
        raise ValueError(f"no convolution of {list(x.shape)} by {list(weights.shape)} with {how}")


def _call(name: str, result: Tensor, first: Tensor, second: Tensor, shape: tuple[int, ...]) -> None:
    pointers = map(pointer, (result, first, second))
    if not getattr(loaded(), name)(*pointers, (ctypes.c_int * len(shape))(*shape)):
        raise MemoryError(f"no memory for the sums of {name}")
