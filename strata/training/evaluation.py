"""Score, loss and further metrics of a cut.

Batch norm in evaluation, `bn`:
re-estimated   running statistics from a few hundred training images (statistics.reestimated), then ordinary inference
batch          as published: each batch of 1024 test images, in a fixed shuffled order, is its own statistics
The work comes in numbered units (batches); whoever runs them in whatever order, `combine` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.data.objectives import Objective, Sums
from strata.training.kernels import own_convolutions
from strata.training.settings import LocalTraining
from strata.training.statistics import BatchStatistics, reestimated
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.data.samples import Samples
    from strata.graph import Cut

BN_MODES = ("re-estimated", "batch")
UNIT_SAMPLES = {"re-estimated": 64, "batch": 1024}  # 64 images fit the cache; 1024 is as published


@dataclass(frozen=True)
class EvaluatedBatch:
    """The result of one unit."""

    number: int
    samples: int
    loss_sum: float
    sums: Sums  # what the objective makes its score of


@dataclass(frozen=True)
class Evaluation:
    accuracy: float  # the objective's score, 0 to 1
    loss: float
    sums: Sums
    bn: str
    metrics: Mapping[str, Any]  # beside the score; of a classification: per_class_accuracy


def units(samples: int, bn: str) -> int:
    """How many units this many samples make."""
    if bn not in BN_MODES:
        raise BadInput(f"bn is one of {', '.join(BN_MODES)}, not {bn!r}")
    return -(-samples // UNIT_SAMPLES[bn])


def evaluate_units(
    workspace: Workspace,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    bn: str,
    numbers: Iterable[int],
    fixed: Collection[str] = (),
) -> list[EvaluatedBatch]:
    """These units of the test set. For `re-estimated`, `tensors` come from statistics.reestimated; for `batch`, the
    statistics of `fixed` batch norms (by their running means) are those of `tensors`."""
    units(len(samples), bn)
    small = workspace.submodel(cut, settings.device)
    small.load(tensors)
    small.module.eval()
    order = torch.arange(len(samples))
    if bn == "batch":
        order = torch.randperm(len(samples), generator=generator(0, "evaluation order"))
    batches = order.split(UNIT_SAMPLES[bn])
    results = []
    with torch.inference_mode(), own_convolutions(settings.kernels):
        for number in numbers:
            index = batches[number]
            batch = tuple(tensor[index] for tensor in samples.tensors)
            x, y = small.arranged(settings.prepared(batch)), samples.targets[index].to(small.device)
            if bn == "re-estimated":
                outputs = small.module(*x)
            elif small.by_chunks is not None and not fixed:
                outputs = small.by_chunks(small, x)
            else:
                with BatchStatistics(fixed=[small.state[name] for name in fixed]):
                    outputs = small.module(*x)
            loss_sum = settings.mean_loss(outputs, y).item() * len(y)
            results.append(EvaluatedBatch(number, len(y), loss_sum, settings.objective.sums(outputs, y)))
    return results


def added(parts: Sequence[Sums]) -> Sums:
    """Of several sets of samples together."""
    names = parts[0] if parts else ()
    return {name: tuple(sum(column) for column in zip(*(part[name] for part in parts), strict=True)) for name in names}


def combine(results: Iterable[EvaluatedBatch], bn: str, objective: Objective) -> Evaluation:
    ordered = sorted(results, key=lambda unit: unit.number)  # float sums depend on the order
    sums = added([unit.sums for unit in ordered])
    loss = sum(unit.loss_sum for unit in ordered) / sum(unit.samples for unit in ordered)
    return Evaluation(objective.score(sums), loss, sums, bn, objective.metrics(sums))


def evaluate(
    workspace: Workspace,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    bn: str = "re-estimated",
    calibration: Samples | None = None,
    fixed: Collection[str] = (),
) -> Evaluation:
    """The whole test set in this process. `tensors`: cut.extract(state). `calibration`: training samples."""
    if len(samples) == 0:
        raise BadInput("there are no samples to evaluate on")
    count = units(len(samples), bn)
    if bn == "re-estimated":
        if calibration is None or len(calibration) == 0:
            raise BadInput("bn re-estimated needs some training samples (calibration); bn batch needs none")
        tensors = reestimated(workspace, cut, tensors, calibration, settings, fixed)
    found = evaluate_units(workspace, cut, tensors, samples, settings, bn, range(count), fixed)
    return combine(found, bn, settings.objective)
