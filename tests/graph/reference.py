"""The reference that a submodel must equal: the full model with every dropped coordinate set to zero.

Where an operation reduces over channels (LayerNorm), the reference reduces over the kept ones only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.graph import ChannelGraph, Cut
from strata.graph.inputs import arguments_of


def block_mask(cut: Cut, name: str, shape: tuple[int, ...]) -> Tensor:
    """True on the outer product of the kept indices: written with a loop over dims, not with Cut's own indexing."""
    mask = torch.ones(shape, dtype=torch.bool)
    for dim, kept in enumerate(cut.kept[name]):
        if kept is not None:
            along = torch.zeros(shape[dim], dtype=torch.bool)
            along[list(kept)] = True
            mask &= along.view([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


def zeroed(model: nn.Module, cut: Cut) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in cut.kept and tensor.is_floating_point():  # a weight of two names is there by its first
                tensor.mul_(block_mask(cut, name, tuple(tensor.shape)))
    return model


@contextmanager
def norms_over_kept(model: nn.Module, cut: Cut) -> Iterator[None]:
    """functional.layer_norm that takes mean and variance over the kept channels only."""
    kept = {id(p): cut.kept[name][0] for name, p in model.named_parameters() if p.dim() == 1}
    original = functional.layer_norm

    def layer_norm(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        indices = kept.get(id(weight))
        if indices is None:
            return original(x, shape, weight, bias, eps)
        chosen = x[..., list(indices)]
        mean = chosen.mean(-1, keepdim=True)
        variance = chosen.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + eps) * weight + bias

    with mock.patch.object(functional, "layer_norm", layer_norm):
        yield


@contextmanager
def frozen_tables(graph: ChannelGraph, cut: Cut) -> Iterator[None]:
    """Embeddings without a gradient, where the cut freezes this use of a weight that is trained as a classifier."""
    original = functional.embedding

    def embedding(index: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        return original(index, weight.detach(), *rest, **named)

    with mock.patch.object(functional, "embedding", embedding if graph.detached(cut) else original):
        yield


def loss_of(outputs: Tensor) -> Tensor:
    """Of four samples; at all positions of one the same class."""
    y = torch.tensor([3, 1, 0, 2])
    if outputs.dim() == 2:
        return functional.cross_entropy(outputs, y)
    return functional.cross_entropy(outputs.flatten(0, 1), y.repeat_interleave(outputs.shape[1]))


def random_inputs(graph: ChannelGraph, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Four samples: numbers, ids below 4, masks."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(4, *one.shape, generator=generator, dtype=dtype)
        if one.dtype.is_floating_point
        else torch.randint(2 if one.dtype is torch.bool else 4, (4, *one.shape), generator=generator).to(one.dtype)
        for one in graph.inputs.inputs
    )


def assert_equals_zeroed(
    model: nn.Module,
    graph: ChannelGraph,
    cut: Cut,
    scores: Callable[[Any], Tensor] = lambda returned: returned,
    output: str | None = None,
    close: float = 1e-9,
) -> None:
    """Outputs in both modes, and all gradients, of the submodel and of the zeroed full model agree (float64).

    `scores` picks, out of what the model returns, what the submodel with this `output` returns."""
    x = random_inputs(graph)
    sub = graph.submodel(cut, cut.extract(model.state_dict()), output)
    full = zeroed(model, cut)
    args, kwargs = arguments_of(full, graph.inputs).of(dict(zip(graph.inputs.names, x, strict=True)))
    for training in (True, False):
        sub.train(training)
        full.train(training)
        with norms_over_kept(full, cut), frozen_tables(graph, cut):
            wanted = scores(full(*args, **kwargs))
        got = sub(*x)
        torch.testing.assert_close(got, wanted, rtol=close, atol=close)
        if training:
            loss_of(wanted).backward()
            loss_of(got).backward()
    gradients = {name: p.grad for name, p in full.named_parameters()}
    for name, parameter in sub.named_parameters():
        if name in cut.frozen:
            assert parameter.grad is None and not parameter.requires_grad
            continue
        reference = gradients[name]
        if output is not None and reference is None and parameter.grad is None:
            continue  # of a part that this output does not need
        assert reference is not None and parameter.grad is not None, f"{name} is trained but gets no gradient"
        torch.testing.assert_close(
            parameter.grad,
            cut.extract_one(name, reference),
            rtol=100 * close,
            atol=close,
            msg=lambda text, name=name: f"{name}: {text}",
        )
