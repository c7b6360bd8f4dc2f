"""Batch norm's statistics of several sets of images as those of all the images together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MEAN, VARIANCE = "running_mean", "running_var"


def pooled(found: Sequence[tuple[int, Mapping[str, Tensor]]], robust: bool = False) -> dict[str, Tensor]:
    """Of (images, buffers): means weighted by images, in double precision; of counters the median.

    `robust`: the median of each coordinate instead, one voice for each set, so that a few that lie move none far. The
    variance is taken around the common mean: sets that differ among themselves (other classes on each device) are
    spread further than any one of them.
    """
    weights = torch.tensor([float(images) for images, _ in found], dtype=torch.float64)
    made: dict[str, Tensor] = {}

    def centre(values: Tensor) -> Tensor:
        if robust:
            return values.quantile(0.5, dim=0)
        return torch.tensordot(weights / weights.sum(), values, dims=1)

    for name, tensor in found[0][1].items():
        values = _stacked(found, name)
        if not tensor.is_floating_point():
            made[name] = values.median(0).values
            continue
        values = values.double()
        mean = name.removesuffix(VARIANCE) + MEAN
        if name.endswith(VARIANCE) and mean in found[0][1]:
            means = _stacked(found, mean).double()
            values = values + (means - centre(means)).square()
        most = torch.finfo(tensor.dtype).max  # finite, as all that devices send: also the square of an absurd mean
        made[name] = centre(values).clamp(max=most).to(tensor.dtype)
    return made


def _stacked(found: Sequence[tuple[int, Mapping[str, Tensor]]], name: str) -> Tensor:
    return torch.stack([buffers[name] for _, buffers in found])
