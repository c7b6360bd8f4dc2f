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

from strata.cutting import Cut


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
