"""Operators of an exported step that have kernels of our own (native/kernels.cpp), as torch knows them.

ExecuTorch's portable kernels have no backward of convolutions, are several times slower, and take copies of the size of
an activation where these take none. Each operator is defined here by what torch computes, for tracing and as what its
kernel is tested against; those of the forward pass also say their gradients in operators that have kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_library = torch.library.Library("strata", "DEF")
Ints = Sequence[int]

_CONV = "int[] stride, int[] padding, int[] dilation, int groups"
_SCHEMAS = {  # arguments, and the names of the results
    "conv2d": (f"Tensor x, Tensor w, Tensor? b, {_CONV}", ("out",)),
    "conv2d_grad_input": (f"Tensor dy, Tensor w, int height, int width, {_CONV}", ("out",)),
    "conv2d_grad_weight": (f"Tensor dy, Tensor x, Tensor w, {_CONV}", ("out",)),
    "channel_sum": ("Tensor x", ("out",)),
    "linear": ("Tensor x, Tensor w, Tensor? b", ("out",)),
    "linear_grad_input": ("Tensor dy, Tensor w", ("out",)),
    "linear_grad_weight": ("Tensor dy, Tensor x", ("out",)),
    "row_sum": ("Tensor x", ("out",)),
    "batch_norm": ("Tensor x, Tensor? w, Tensor? b, float eps", ("out", "mean", "invstd")),
    "batch_norm_backward": ("Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor? w", ("dx", "dw", "db")),
    "batch_norm_statistics": ("Tensor x, Tensor? w, Tensor? b, float eps", ("out", "mean", "var")),
    "normalise": ("Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor var, float eps", ("out",)),
    "normalise_backward": (
        "Tensor dy, Tensor x, Tensor? w, Tensor mean, Tensor var, float eps",
        ("dx", "dw", "db"),
    ),
    "relu": ("Tensor x", ("out",)),
    "relu_backward": ("Tensor dy, Tensor y", ("out",)),
    "clamp": ("Tensor x, float low, float high", ("out",)),
    "clamp_backward": ("Tensor dy, Tensor x, float low, float high", ("out",)),
    "avg_pool2d": ("Tensor x, int[] kernel, int[] stride, int[] padding, bool count_pad", ("out",)),
    "avg_pool2d_backward": (
        "Tensor dy, int height, int width, int[] kernel, int[] stride, int[] padding, bool count_pad",
        ("out",),
    ),
    "max_pool2d": ("Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation", ("out", "at")),
    "max_pool2d_backward": ("Tensor dy, Tensor at, int height, int width", ("out",)),
    "spatial_mean": ("Tensor x", ("out",)),
    "spatial_mean_backward": ("Tensor dy, int height, int width", ("out",)),
    "gelu": ("Tensor x, bool tanh", ("out",)),
    "gelu_backward": ("Tensor dy, Tensor x, bool tanh", ("out",)),
    "silu": ("Tensor x", ("out",)),
    "silu_backward": ("Tensor dy, Tensor x", ("out",)),
    "softmax": ("Tensor x", ("out",)),
    "softmax_backward": ("Tensor dy, Tensor y", ("out",)),
    "layer_norm": ("Tensor x, Tensor? w, Tensor? b, int width, float eps", ("out", "mean", "invstd")),
    "layer_norm_backward": (
        "Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor? w, int width",
        ("dx", "dw", "db"),
    ),
    "attention": ("Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale", ("out",)),
    "attention_backward": (
        "Tensor dy, Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale",
        ("dq", "dk", "dv"),
    ),
    "slice": ("Tensor x, int dim, int start, int end, int step", ("out",)),
    "slice_backward": ("Tensor dy, int dim, int size, int start, int step", ("out",)),
    "dropout_mask": ("Tensor x, float p, int number", ("out",)),
    "cross_entropy": ("Tensor scores, Tensor labels", ("loss", "gradient")),
    "add_to": ("Tensor gradient, int slot", ("out",)),
}


def _define(name: str, arguments: str, results: Sequence[str]) -> None:
    """With the variant that writes into given tensors, which is what a program calls."""
    letters = "abcdefgh"[: len(results)]
    one = len(results) == 1
    returned = "Tensor" if one else "(" + ", ".join("Tensor" for _ in results) + ")"
    _library.define(f"{name}({arguments}) -> {returned}")
    outs = ", ".join(f"Tensor({letter}!) {result}" for letter, result in zip(letters, results, strict=True))
    marked = [f"Tensor({letter}!)" for letter in letters]
    _library.define(f"{name}.out({arguments}, *, {outs}) -> {marked[0] if one else '(' + ', '.join(marked) + ')'}")


for _name, (_arguments, _results) in _SCHEMAS.items():
    _define(_name, _arguments, _results)
ops = torch.ops.strata


# --- what each computes ------------------------------------------------------------------------------------------


def conv2d(x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Tensor:
    return aten.convolution(x, w, b, stride, padding, dilation, False, [0, 0], groups).contiguous()


def conv2d_grad_input(
    dy: Tensor, w: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    x = dy.new_empty([dy.shape[0], w.shape[1] * groups, height, width])
    common = (stride, padding, dilation, False, [0, 0], groups)
    return aten.convolution_backward(dy, x, w, None, *common, [True, False, False])[0].contiguous()


def conv2d_grad_weight(
    dy: Tensor, x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    common = (stride, padding, dilation, False, [0, 0], groups)
    return aten.convolution_backward(dy, x, w, None, *common, [False, True, False])[1].contiguous()


def channel_sum(x: Tensor) -> Tensor:
    """[N, C, ...] -> [C]"""
    return x.sum([0, *range(2, x.dim())])


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return aten.linear(x, w, b)


def linear_grad_input(dy: Tensor, w: Tensor) -> Tensor:
    return dy @ w


def linear_grad_weight(dy: Tensor, x: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def row_sum(x: Tensor) -> Tensor:
    """[..., K] -> [K]"""
    return x.sum(list(range(x.dim() - 1)))


def _along_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.view([1, -1] + [1] * (x.dim() - 2))


def _affine(x: Tensor, mean: Tensor, invstd: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    out = (x - _along_channels(mean, x)) * _along_channels(invstd, x)
    out = out if w is None else out * _along_channels(w, x)
    return out if b is None else out + _along_channels(b, x)


def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = [0, *range(2, x.dim())]
    mean = x.mean(axes)
    invstd = (x.var(axes, correction=0) + eps).rsqrt()
    return _affine(x, mean, invstd, w, b), mean, invstd


def batch_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    axes = [0, *range(2, x.dim())]
    count = x.numel() / x.shape[1]
    centred = x - _along_channels(mean, x)
    db = dy.sum(axes)
    dw = (dy * centred).sum(axes) * invstd
    scale = invstd if w is None else invstd * w
    inner = dy - _along_channels(db / count, x) - centred * _along_channels(invstd * dw / count, x)
    return inner * _along_channels(scale, x), dw, db


def batch_norm_statistics(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the variance over n - 1, as running statistics hold it."""
    out, mean, _ = batch_norm(x, w, b, eps)
    return out, mean, x.var([0, *range(2, x.dim())], correction=1)


def normalise(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return _affine(x, mean, (var + eps).rsqrt(), w, b)


def normalise_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = [0, *range(2, x.dim())]
    invstd = (var + eps).rsqrt()
    dw = (dy * (x - _along_channels(mean, x))).sum(axes) * invstd
    return dy * _along_channels(invstd if w is None else invstd * w, x), dw, dy.sum(axes)


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def relu_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, dy, 0)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def clamp_backward(dy: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """As torch's hardtanh, not clamp: at the bounds themselves there is no gradient."""
    return torch.where((x > low) & (x < high), dy, 0)


def avg_pool2d(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, count_pad: bool) -> Tensor:
    return aten.avg_pool2d(x, kernel, stride, padding, False, count_pad).contiguous()


def avg_pool2d_backward(
    dy: Tensor, height: int, width: int, kernel: Ints, stride: Ints, padding: Ints, count_pad: bool
) -> Tensor:
    x = dy.new_empty([*dy.shape[:2], height, width])
    return aten.avg_pool2d_backward(dy, x, kernel, stride, padding, False, count_pad, None).contiguous()


def max_pool2d(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> tuple[Tensor, Tensor]:
    out, at = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation)
    return out.contiguous(), at.contiguous()


def max_pool2d_backward(dy: Tensor, at: Tensor, height: int, width: int) -> Tensor:
    flat = dy.new_zeros([dy.shape[0], dy.shape[1], height * width])
    return flat.scatter_add(2, at.flatten(2), dy.flatten(2)).view([dy.shape[0], dy.shape[1], height, width])


def spatial_mean(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, C]"""
    return x.mean([2, 3])


def spatial_mean_backward(dy: Tensor, height: int, width: int) -> Tensor:
    return (dy / (height * width))[:, :, None, None].expand(-1, -1, height, width).contiguous()


def gelu(x: Tensor, tanh: bool) -> Tensor:
    return aten.gelu(x, approximate="tanh" if tanh else "none")


def gelu_backward(dy: Tensor, x: Tensor, tanh: bool) -> Tensor:
    return aten.gelu_backward(dy, x, approximate="tanh" if tanh else "none")


def silu(x: Tensor) -> Tensor:
    return aten.silu(x)


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.silu_backward(dy, x)


def softmax(x: Tensor) -> Tensor:
    """Along the last dimension."""
    return x.softmax(-1)


def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def layer_norm(x: Tensor, w: Tensor | None, b: Tensor | None, width: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of `width` elements, which may be several dimensions; a mean and a factor for each row."""
    rows = x.reshape(-1, width)
    mean = rows.mean(1)
    invstd = (rows.var(1, correction=0) + eps).rsqrt()
    out = (rows - mean[:, None]) * invstd[:, None]
    out = out if w is None else out * w.flatten()
    out = out if b is None else out + b.flatten()
    return out.reshape(x.shape), mean, invstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, w: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    given = dy.reshape(-1, width)
    normed = (x.reshape(-1, width) - mean[:, None]) * invstd[:, None]
    scaled = given if w is None else given * w.flatten()
    along = (scaled * normed).mean(1, keepdim=True)
    dx = (scaled - scaled.mean(1, keepdim=True) - normed * along) * invstd[:, None]
    return dx.reshape(x.shape), (given * normed).sum(0), given.sum(0)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """[N, H, queries, D] of [N, H, keys, D]. The kernel holds one row of weights at a time. `mask`: of what is seen, or
    numbers to add; its sizes are those of the weights, or 1."""
    return _weights(q, k, mask, causal, scale) @ v


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With the weights computed once more: a map of queries by keys is never kept, nor is the result."""
    weights = _weights(q, k, mask, causal, scale)
    by_weights = dy @ v.transpose(-2, -1)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True)) * scale
    return by_scores @ k, by_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ dy


def slice_(x: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    """0 <= start < end <= the dimension's size."""
    return aten.slice(x, dim, start, end, step).clone(memory_format=torch.contiguous_format)


def slice_backward(dy: Tensor, dim: int, size: int, start: int, step: int) -> Tensor:
    """Zeros but for what was taken: torch's own is taken apart into three tensors of the whole size."""
    out = dy.new_zeros([*dy.shape[:dim], size, *dy.shape[dim + 1 :]])
    aten.slice(out, dim, start, start + (dy.shape[dim] - 1) * step + 1, step).copy_(dy)
    return out


def dropout_mask(x: Tensor, p: float, number: int) -> Tensor:
    """Zeros where a value is dropped, 1 / (1 - p) elsewhere. `number`: of the dropout in its network. Kernels draw from
    the training's seed; torch's own generator is another."""
    return torch.where(torch.rand_like(x) < p, 0.0, 1.0 / (1.0 - p)) if p < 1 else torch.zeros_like(x)


def cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the samples, and its gradient by the scores."""
    rows = scores.log_softmax(1)
    picked = torch.nn.functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
    return -(rows * picked).sum() / scores.shape[0], (rows.exp() - picked) / scores.shape[0]


def add_to(gradient: Tensor, slot: int) -> Tensor:
    """The kernel adds the gradient to what earlier parts of the batch gave, outside the program's memory."""
    return gradient.new_zeros([1])


# --- of which shape: for tracing, where the number of samples is not known -----------------------------------------


def _out_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _conv2d_shape(x: Tensor, w: Tensor, b: Any, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Tensor:
    sides = (_out_size(x.shape[2 + i], w.shape[2 + i], stride[i], padding[i], dilation[i]) for i in range(2))
    return x.new_empty([x.shape[0], w.shape[0], *sides])


def _pool_shape(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints = (1, 1)) -> list[int]:
    sides = (_out_size(x.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i]) for i in range(2))
    return [*x.shape[:2], *sides]


def _norm_shape(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty([x.shape[1]]), x.new_empty([x.shape[1]])


def _rows_shape(x: Tensor, w: Any, b: Any, width: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // width
    return torch.empty_like(x), x.new_empty([rows]), x.new_empty([rows])


def _same_shape(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


_SHAPES: dict[Any, Any] = {
    conv2d: _conv2d_shape,
    conv2d_grad_input: lambda dy, w, height, width, s, p, d, groups: dy.new_empty(
        [dy.shape[0], w.shape[1] * groups, height, width]
    ),
    conv2d_grad_weight: lambda dy, x, w, *options: torch.empty_like(w),
    channel_sum: lambda x: x.new_empty([x.shape[1]]),
    linear: lambda x, w, b: x.new_empty([*x.shape[:-1], w.shape[0]]),
    linear_grad_input: lambda dy, w: dy.new_empty([*dy.shape[:-1], w.shape[1]]),
    linear_grad_weight: lambda dy, x: dy.new_empty([dy.shape[-1], x.shape[-1]]),
    row_sum: lambda x: x.new_empty([x.shape[-1]]),
    batch_norm: _norm_shape,
    batch_norm_backward: _norm_shape,
    batch_norm_statistics: _norm_shape,
    normalise: _same_shape,
    normalise_backward: _norm_shape,
    relu: _same_shape,
    relu_backward: _same_shape,
    clamp: _same_shape,
    clamp_backward: _same_shape,
    avg_pool2d: lambda x, k, s, p, counts: x.new_empty(_pool_shape(x, k, s, p)),
    avg_pool2d_backward: lambda dy, height, width, *rest: dy.new_empty([*dy.shape[:2], height, width]),
    max_pool2d: lambda x, k, s, p, d: (
        x.new_empty(_pool_shape(x, k, s, p, d)), x.new_empty(_pool_shape(x, k, s, p, d), dtype=torch.int64)
    ),
    max_pool2d_backward: lambda dy, at, height, width: dy.new_empty([*dy.shape[:2], height, width]),
    spatial_mean: lambda x: x.new_empty(x.shape[:2]),
    spatial_mean_backward: lambda dy, height, width: dy.new_empty([*dy.shape, height, width]),
    gelu: _same_shape,
    gelu_backward: _same_shape,
    silu: _same_shape,
    silu_backward: _same_shape,
    softmax: _same_shape,
    softmax_backward: _same_shape,
    layer_norm: _rows_shape,
    layer_norm_backward: lambda dy, x, mean, invstd, w, width: (
        torch.empty_like(x), x.new_empty([width]), x.new_empty([width])
    ),
    attention: lambda q, k, v, mask, causal, scale: q.new_empty([*q.shape[:-1], v.shape[-1]]),
    attention_backward: lambda dy, q, k, v, mask, causal, scale: (
        torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ),
    slice_: lambda x, dim, start, end, step: x.new_empty(
        [*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :]]
    ),
    slice_backward: lambda dy, dim, size, start, step: dy.new_empty([*dy.shape[:dim], size, *dy.shape[dim + 1 :]]),
    dropout_mask: _same_shape,
    cross_entropy: lambda scores, labels: (scores.new_empty([]), torch.empty_like(scores)),
    add_to: lambda gradient, slot: gradient.new_empty([1]),
}  # fmt: skip
for _function, _shape in _SHAPES.items():
    _name = _function.__name__.removesuffix("_")
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"strata::{_name}", _shape, lib=_library)


# --- their gradients ---------------------------------------------------------------------------------------------


def _with_gradient(name: str, keep: Any, backward: Any) -> None:
    """`keep(inputs, output)`: the tensors to save, and what else backward needs; it gets both and the gradients."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        saved, ctx.rest = keep(inputs, output)
        ctx.save_for_backward(*saved)

    def run(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx.saved_tensors, ctx.rest, ctx.needs_input_grad, *gradients)

    torch.library.register_autograd(f"strata::{name}", run, setup_context=setup, lib=_library)


def _conv2d_keep(inputs: Any, output: Tensor) -> Any:
    x, w, _, *options = inputs
    return (x, w), (x.shape[2], x.shape[3], options)


def _conv2d_backward(saved: Any, rest: Any, wanted: Sequence[bool], dy: Tensor) -> Any:
    (x, w), (height, width, options) = saved, rest
    dw = ops.conv2d_grad_weight(dy, x, w, *options) if wanted[1] else None  # first: then the input may go
    dx = ops.conv2d_grad_input(dy, w, height, width, *options) if wanted[0] else None
    return dx, dw, ops.channel_sum(dy) if wanted[2] else None, None, None, None, None


def _linear_backward(saved: Any, rest: Any, wanted: Sequence[bool], dy: Tensor) -> Any:
    x, w = saved
    dw = ops.linear_grad_weight(dy, x) if wanted[1] else None
    dx = ops.linear_grad_input(dy, w) if wanted[0] else None
    return dx, dw, ops.row_sum(dy) if wanted[2] else None


def _batch_norm_keep(inputs: Any, output: Any) -> Any:
    x, w, _, _ = inputs
    return (x, output[1], output[2], *(() if w is None else (w,))), None


def _batch_norm_backward(saved: Any, rest: Any, wanted: Sequence[bool], dy: Tensor, *others: Any) -> Any:
    x, mean, invstd, *w = saved
    dx, dw, db = ops.batch_norm_backward(dy, x, mean, invstd, w[0] if w else None)
    return dx if wanted[0] else None, dw if wanted[1] else None, db if wanted[2] else None, None


def _normalise_keep(inputs: Any, output: Any) -> Any:
    x, w, _, mean, var, eps = inputs
    return (x, mean, var, *(() if w is None else (w,))), eps


def _normalise_backward(saved: Any, eps: float, wanted: Sequence[bool], dy: Tensor) -> Any:
    x, mean, var, *w = saved
    dx, dw, db = ops.normalise_backward(dy, x, w[0] if w else None, mean, var, eps)
    return dx if wanted[0] else None, dw if wanted[1] else None, db if wanted[2] else None, None, None, None


def _layer_norm_keep(inputs: Any, output: Any) -> Any:
    x, w, b, width, _ = inputs
    shapes = [None if one is None else one.shape for one in (w, b)]
    return (x, output[1], output[2], *(() if w is None else (w,))), (width, shapes)


def _layer_norm_backward(saved: Any, rest: Any, wanted: Sequence[bool], dy: Tensor, *others: Any) -> Any:
    (x, mean, invstd, *w), (width, shapes) = saved, rest
    dx, *affine = ops.layer_norm_backward(dy, x, mean, invstd, w[0] if w else None, width)
    found = [
        one.view(shape) if wanted[1 + i] else None for i, (one, shape) in enumerate(zip(affine, shapes, strict=True))
    ]
    return dx if wanted[0] else None, *found, None, None


_with_gradient("conv2d", _conv2d_keep, _conv2d_backward)
_with_gradient("linear", lambda inputs, output: (inputs[:2], None), _linear_backward)
_with_gradient("batch_norm", _batch_norm_keep, _batch_norm_backward)
_with_gradient("normalise", _normalise_keep, _normalise_backward)
_with_gradient(
    "relu",
    lambda inputs, output: ((output,), None),
    lambda saved, rest, wanted, dy: ops.relu_backward(dy, saved[0]),
)
_with_gradient(
    "clamp",
    lambda inputs, output: ((inputs[0],), inputs[1:]),
    lambda saved, rest, wanted, dy: (ops.clamp_backward(dy, saved[0], *rest), None, None),
)
_with_gradient(
    "avg_pool2d",
    lambda inputs, output: ((), (inputs[0].shape[2], inputs[0].shape[3], inputs[1:])),
    lambda saved, rest, wanted, dy: (
        ops.avg_pool2d_backward(dy, rest[0], rest[1], *rest[2]), None, None, None, None
    ),
)  # fmt: skip
_with_gradient(
    "max_pool2d",
    lambda inputs, output: ((output[1],), (inputs[0].shape[2], inputs[0].shape[3])),
    lambda saved, rest, wanted, dy, _: (ops.max_pool2d_backward(dy, saved[0], *rest), None, None, None, None),
)
_with_gradient(
    "spatial_mean",
    lambda inputs, output: ((), (inputs[0].shape[2], inputs[0].shape[3])),
    lambda saved, rest, wanted, dy: ops.spatial_mean_backward(dy, *rest),
)
_with_gradient(
    "slice",
    lambda inputs, output: ((), (inputs[1], inputs[0].shape[inputs[1]], inputs[2], inputs[4])),
    lambda saved, rest, wanted, dy: (ops.slice_backward(dy, *rest), None, None, None, None),
)
_with_gradient("layer_norm", _layer_norm_keep, _layer_norm_backward)
_with_gradient(
    "attention",
    lambda inputs, output: ([one for one in inputs[:4] if one is not None], inputs[4:]),
    lambda saved, rest, wanted, dy: (
        *ops.attention_backward(dy, *saved[:3], saved[3] if len(saved) == 4 else None, *rest), None, None, None
    ),
)  # fmt: skip
_with_gradient(
    "gelu",
    lambda inputs, output: (inputs[:1], inputs[1]),
    lambda saved, tanh, wanted, dy: (ops.gelu_backward(dy, saved[0], tanh), None),
)
_with_gradient(
    "silu",
    lambda inputs, output: (inputs, None),
    lambda saved, rest, wanted, dy: ops.silu_backward(dy, saved[0]),
)
_with_gradient(
    "softmax",
    lambda inputs, output: ((output,), None),
    lambda saved, rest, wanted, dy: ops.softmax_backward(dy, saved[0]),
)
_with_gradient(
    "cross_entropy",
    lambda inputs, output: ((output[1],), None),
    lambda saved, rest, wanted, dloss, _: (saved[0] * dloss, None),
)
