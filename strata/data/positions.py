"""A class for each position of a sample: the next token of a text, the tag of a word, what a pixel shows.

Targets are int64 [N, positions] or [N, height, width]; IGNORED ones, such as padding, count for nothing. Outputs are
[batch, positions, classes], or, as networks of pictures have it, [batch, classes, height, width]. The loss of a sample
is the mean over its own positions, so that long and short ones weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data.objectives import (
    IGNORED,
    Objective,
    Sums,
    check_classes,
    check_counts,
    kind_of,
    macro_f1,
    mean_of,
    per_class,
)


@dataclass(frozen=True)
class PerPosition(Objective):
    """Cross-entropy at each position; the score is the share of positions that are right. Beside it: the mean over
    classes of intersection over union (mIoU), and F1."""

    name: ClassVar[str] = "per-position"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, wanted = _rows(outputs, targets)
        each = functional.cross_entropy(rows, wanted, ignore_index=IGNORED, reduction="none").view(len(targets), -1)
        counted = (targets.reshape(len(targets), -1) != IGNORED).sum(1).clamp(min=1)
        return each.sum(1) / counted

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        rows, wanted = _counted(outputs, targets)
        predicted = rows.argmax(1)
        parts = {"correct": wanted[predicted == wanted], "counts": wanted, "predicted": predicted}
        return {name: tuple(torch.bincount(one, minlength=rows.shape[1]).tolist()) for name, one in parts.items()}

    def score(self, sums: Sums) -> float:
        return sum(sums["correct"]) / max(1, sum(sums["counts"]))

    def metrics(self, sums: Sums) -> dict[str, Any]:
        triples = zip(sums["correct"], sums["counts"], sums["predicted"], strict=True)
        unions = [(right, count + predicted - right) for right, count, predicted in triples]
        each = [right / union if union else None for right, union in unions]
        return {
            "per_class_accuracy": list(per_class(sums)),
            "iou": each,
            "mean_iou": mean_of(each),
            "f1": macro_f1(sums),
        }

    def suits(self, outputs: Sequence[int], classes: int, targets: Sequence[int]) -> bool:
        return tuple(outputs) in ((*targets, classes), (classes, *targets))

    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        classes = outputs[-1] if len(outputs) < 3 else outputs[0]
        check_positions(targets, classes, "per-position classes")

    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        positions = outputs[:-1] if len(outputs) < 3 else outputs[1:]
        return torch.zeros(samples, *positions, dtype=torch.int64)

    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        classes = outputs[-1] if len(outputs) < 3 else outputs[0]
        check_counts(sums, dict.fromkeys(("correct", "counts", "predicted"), classes))
        check_classes(sums, samples * math.prod(outputs) // classes, least=0)


@dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the token that follows each position, targets [N, positions]. The score is the share of tokens
    that are predicted right; beside it: perplexity, over all tokens."""

    name: ClassVar[str] = "next-token"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return PerPosition().loss(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        rows, wanted = _counted(outputs, targets)
        right = int((rows.argmax(1) == wanted).sum())
        lost = functional.cross_entropy(rows, wanted, reduction="none").double().sum().item()
        return {"correct": (right,), "tokens": (len(wanted),), "nll": (lost,)}

    def score(self, sums: Sums) -> float:
        return sums["correct"][0] / max(1, sums["tokens"][0])

    def metrics(self, sums: Sums) -> dict[str, Any]:
        mean = sums["nll"][0] / max(1, sums["tokens"][0])
        return {"perplexity": math.exp(mean) if mean < 700 else None}  # None: beyond what a float holds, or nan

    def suits(self, outputs: Sequence[int], classes: int, targets: Sequence[int]) -> bool:
        """A pretrained model may have scores for more tokens than its tokenizer has."""
        return tuple(outputs[:-1]) == tuple(targets) and outputs[-1] >= classes

    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        check_positions(targets, outputs[-1], "tokens to predict")
        if targets.dim() != 2:
            raise BadInput(f"labels are {kind_of(targets)}; tokens to predict are [N, positions]")

    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        return torch.zeros(samples, *outputs[:-1], dtype=torch.int64)

    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        if {name: len(values) for name, values in sums.items()} != {"correct": 1, "tokens": 1, "nll": 1}:
            raise ValueError("no sums over tokens")
        (right,), (tokens,), (lost,) = sums["correct"], sums["tokens"], sums["nll"]
        if not all(type(value) is int for value in (right, tokens)) or type(lost) not in (int, float):
            raise ValueError("counts that are none")
        if not 0 <= right <= tokens <= samples * math.prod(outputs[:-1]) or not 0 <= lost < math.inf:
            raise ValueError("counts that do not fit what it holds out")


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[batch * positions, classes] and [batch * positions]."""
    if outputs.dim() == 4:
        outputs = outputs.permute(0, 2, 3, 1)
    return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)


def _counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows, wanted = _rows(outputs, targets)
    counted = wanted != IGNORED
    return rows[counted], wanted[counted]


def check_positions(targets: Tensor, classes: int, what: str) -> None:
    if targets.dtype != torch.int64 or targets.dim() < 2:
        raise BadInput(f"labels are {kind_of(targets)}; {what} are whole numbers, int64 [N, positions]")
    counted = targets[targets != IGNORED]
    if not len(counted):
        raise BadInput(f"labels are all {IGNORED}, which counts for nothing: there is nothing to learn")
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= classes:
        raise BadInput(
            f"labels run from {low} to {high}; with {classes} classes they should be within 0 to {classes - 1}, or "
            f"{IGNORED} for padding"
        )
