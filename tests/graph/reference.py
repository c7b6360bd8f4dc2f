"""The reference that a submodel must equal: the full model with every dropped coordinate set to zero.

Where an operation reduces over channels (LayerNorm), the reference reduces over the kept ones only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.graph import ChannelGraph, Cut


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
            if tensor.is_floating_point():
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


def assert_equals_zeroed(model: nn.Module, graph: ChannelGraph, cut: Cut) -> None:
    """Outputs in both modes, and all gradients, of the submodel and of the zeroed full model agree (float64)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, *graph.input_shape, generator=generator, dtype=torch.float64)
    y = torch.tensor([3, 1, 0, 2])
    sub = graph.submodel(cut, cut.extract(model.state_dict()))
    full = zeroed(model, cut)
    for training in (True, False):
        sub.train(training)
        full.train(training)
        with norms_over_kept(full, cut):
            wanted = full(x)
        got = sub(x)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        if training:
            functional.cross_entropy(wanted, y).backward()
            functional.cross_entropy(got, y).backward()
    gradients = {name: p.grad for name, p in full.named_parameters()}
    for name, parameter in sub.named_parameters():
        if name in cut.frozen:
            assert parameter.grad is None and not parameter.requires_grad
            continue
        reference = gradients[name]
        assert reference is not None and parameter.grad is not None, f"{name} is trained but gets no gradient"
        torch.testing.assert_close(
            parameter.grad,
            cut.extract_one(name, reference),
            rtol=1e-7,
            atol=1e-9,
            msg=lambda text, name=name: f"{name}: {text}",
        )
