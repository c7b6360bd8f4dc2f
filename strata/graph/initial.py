"""Initial weights of a part of a model that is trained as a network of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

if TYPE_CHECKING:
    from strata.graph import Cut


def own_fan_in(model: nn.Module, cut: Cut, tensors: dict[str, Tensor]) -> None:
    """Scales fresh weights, in place, to what they would be in a network of the cut's own width.

    Torch draws a layer's weights and biases within 1 / sqrt(fan-in). A layer that keeps a part of its inputs has a
    smaller fan-in than the one the weights were drawn for, and would start too small by the root of the ratio.
    """
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Linear | _ConvNd) or isinstance(module, _ConvTransposeNd):
            continue
        weight = f"{prefix}.weight" if prefix else "weight"
        if weight not in cut.shapes:  # a weight that is computed from others (weight norm)
            continue
        full, kept = (math.prod(shape[1:]) for shape in (tensors[weight].shape, cut.shapes[weight]))
        if full == kept:
            continue
        for name in (weight, weight.removesuffix("weight") + "bias"):
            if name in tensors:
                tensors[name] *= torch.tensor(math.sqrt(full / kept), dtype=tensors[name].dtype)
