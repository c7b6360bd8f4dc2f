"""Accuracy, loss and per-class counts of a cut.

Batch norm in evaluation, `bn`:
re-estimated   running statistics from a few hundred training images (statistics.reestimated), then ordinary inference
batch          as published: each batch of 1024 test images, in a fixed shuffled order, is its own statistics
The work comes in numbered units (batches); whoever runs them in whatever order, `combine` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.training.kernels import own_convolutions
from strata.training.settings import LocalTraining
from strata.training.statistics import BatchStatistics, reestimated
from strata.training.submodels import warm

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

BN_MODES = ("re-estimated", "batch")
UNIT_IMAGES = {"re-estimated": 64, "batch": 1024}  # 64 images fit the cache; 1024 is as published


@dataclass(frozen=True)
class Unit:
    """The result of one batch."""

    number: int
    loss_sum: float
    correct: tuple[int, ...]  # per class
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    accuracy: float  # 0 to 1
    loss: float
    correct: tuple[int, ...]  # per class
    counts: tuple[int, ...]
    bn: str

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Accuracy per class; None for a class without samples."""
        pairs = zip(self.correct, self.counts, strict=True)
        return tuple(right / count if count else None for right, count in pairs)


def units(samples: int, bn: str) -> int:
    """How many units this many samples make."""
    if bn not in BN_MODES:
        raise BadInput(f"bn is one of {', '.join(BN_MODES)}, not {bn!r}")
    return -(-samples // UNIT_IMAGES[bn])


def evaluate_units(
    graph: ChannelGraph,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    bn: str,
    numbers: Iterable[int],
) -> list[Unit]:
    """These units of the test set. For `re-estimated`, `tensors` come from statistics.reestimated."""
    units(len(labels), bn)
    small = warm(graph, cut, settings.device)
    small.load(tensors)
    small.module.eval()
    order = torch.arange(len(labels))
    if bn == "batch":
        order = torch.randperm(len(labels), generator=generator(0, "evaluation order"))
    batches = order.split(UNIT_IMAGES[bn])
    results = []
    with torch.inference_mode(), own_convolutions(settings.kernels):
        for number in numbers:
            index = batches[number]
            x, y = small.arranged(settings.prepared(images[index])), labels[index].to(small.device)
            if bn == "re-estimated":
                outputs = small.module(x)
            elif small.by_chunks is not None:
                outputs = small.by_chunks(small, x)
            else:
                with BatchStatistics():
                    outputs = small.module(x)
            loss_sum = settings.loss(outputs, y).item() * len(y)
            right = y[outputs.argmax(1) == y]
            correct, counts = (torch.bincount(part, minlength=graph.classes).tolist() for part in (right, y))
            results.append(Unit(number, loss_sum, tuple(correct), tuple(counts)))
    return results


def combine(results: Iterable[Unit], bn: str) -> Evaluation:
    ordered = sorted(results, key=lambda unit: unit.number)  # float sums depend on the order
    correct = tuple(sum(column) for column in zip(*(unit.correct for unit in ordered), strict=True))
    counts = tuple(sum(column) for column in zip(*(unit.counts for unit in ordered), strict=True))
    samples = sum(counts)
    loss = sum(unit.loss_sum for unit in ordered) / samples
    return Evaluation(sum(correct) / samples, loss, correct, counts, bn)


def evaluate(
    graph: ChannelGraph,
    cut: Cut,
    tensors: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    bn: str = "re-estimated",
    calibration: Tensor | None = None,
) -> Evaluation:
    """The whole test set in this process. `tensors`: cut.extract(state). `calibration`: uint8 training images."""
    if len(labels) == 0:
        raise BadInput("there are no samples to evaluate on")
    count = units(len(labels), bn)
    if bn == "re-estimated":
        if calibration is None or len(calibration) == 0:
            raise BadInput("bn re-estimated needs some training images (calibration); bn batch needs none")
        tensors = reestimated(graph, cut, tensors, calibration, settings)
    return combine(evaluate_units(graph, cut, tensors, images, labels, settings, bn, range(count)), bn)
