"""Batch norm without running averages: devices never upload them, so the server makes its own.

Dropout stays off in all of this: the network runs in eval mode, and only its batch norms are told otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from strata.core.seeds import generator
from strata.training.kernels import own_convolutions
from strata.training.settings import LocalTraining
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.data.samples import Samples
    from strata.graph import Cut

CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 256

BATCH_NORMS = (torch.ops.aten.batch_norm.default, torch.batch_norm)  # in submodels; in plain modules


@dataclass(frozen=True)
class Calibration:
    """What evaluation measures batch norm's statistics on: some of a part's samples, or of the devices' (train)."""

    part: str = "train"
    images: int = CALIBRATION_IMAGES


class BatchStatistics(TorchFunctionMode):
    """Batch norms use the statistics of the batch, but for those whose running means are `fixed`. With `weight`, they
    also move their running statistics that far towards them (1 = replace)."""

    def __init__(self, weight: float | None = None, fixed: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.weight = weight
        self.fixed = {id(mean) for mean in fixed}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in BATCH_NORMS:
            return func(*args, **(kwargs or {}))
        x, weight, bias, mean, variance, _, _, eps, cudnn = args
        if id(mean) in self.fixed:
            return func(x, weight, bias, mean, variance, False, 0.0, eps, cudnn)
        if self.weight is None:
            return func(x, weight, bias, None, None, True, 0.0, eps, cudnn)
        return func(x, weight, bias, mean, variance, True, self.weight, eps, cudnn)


def calibration_indices(samples: int, seed: int, count: int = CALIBRATION_IMAGES) -> Tensor:
    """Which training samples the statistics come from: a fixed random choice, the same in every round."""
    order = torch.randperm(samples, generator=generator(seed, "calibration images"))
    return order[:count]  # not sorted: data that is stored class by class would give batches of one class


def reestimated(
    workspace: Workspace,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    fixed: Collection[str] = (),
) -> dict[str, Tensor]:
    """`tensors` (of the cut) with running statistics measured on these training samples.

    Batch norms that are `fixed` (by their running means) keep theirs, and are what the others are measured behind."""
    graph = workspace.graph
    if not graph.buffer_names:  # nothing that could hold statistics
        return dict(tensors)
    small = workspace.submodel(cut, settings.device)
    small.load(tensors)
    small.module.eval()
    with torch.inference_mode(), own_convolutions(settings.kernels):
        for number, batch in enumerate(samples.split(CALIBRATION_BATCH)):
            # the mean over batches
            with BatchStatistics(1 / (number + 1), [small.state[name] for name in fixed]):
                small.module(*small.arranged(settings.prepared(batch.tensors)))
    result = dict(tensors)
    for name in (name for name in graph.buffer_names if name in cut.shapes):
        result[name] = small.state[name].detach().clone(memory_format=torch.contiguous_format).cpu()
    return result


def plain_state(cut: Cut, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the plain nn.Module loads to compute, in eval mode and at any batch size, what the cut's submodel does with
    these `tensors`, which are `reestimated`.

    Outside the cut all is zero, so dropped channels carry zeros.
    """
    result = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    cut.scatter(result, tensors)
    return result
