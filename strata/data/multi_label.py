"""Several labels for each sample, or none: what a message is about, which sounds are in a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data.objectives import BINS, Objective, Sums, areas, binned, check_counts, kind_of, mean_of


@dataclass(frozen=True)
class MultiLabel(Objective):
    """Binary cross-entropy of each label, targets [N, labels] of 0 and 1. A label is predicted where its score is above
    0. The score is F1 over all labels together (micro)."""

    name: ClassVar[str] = "multi-label"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets.to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").mean(1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        right, predicted = targets.bool(), outputs > 0
        return {
            "samples": (len(targets),),
            "exact": (int((right == predicted).all(1).sum()),),
            "correct": tuple((right & predicted).sum(0).tolist()),
            "counts": tuple(right.sum(0).tolist()),
            "predicted": tuple(predicted.sum(0).tolist()),
            **binned(outputs.sigmoid(), right),
        }

    def score(self, sums: Sums) -> float:
        found = _f1(sum(sums["correct"]), sum(sums["counts"]), sum(sums["predicted"]))
        return 1.0 if found is None else found  # there was no label to find, and none was found

    def metrics(self, sums: Sums) -> dict[str, Any]:
        triples = zip(sums["correct"], sums["counts"], sums["predicted"], strict=True)
        each = [_f1(*triple) for triple in triples]
        return {
            "f1_of_labels": each,
            "f1_micro": self.score(sums),
            "f1_macro": mean_of(each),
            "auc": mean_of(areas(sums)),
            "exact": sums["exact"][0] / sums["samples"][0],
        }

    def suits(self, outputs: Sequence[int], classes: int, targets: Sequence[int]) -> bool:
        return tuple(outputs) == (classes,)

    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        if targets.dim() != 2 or targets.shape[1] != outputs[-1]:
            raise BadInput(
                f"labels are {kind_of(targets)}; several labels of {outputs[-1]} are 0 or 1 for each, "
                f"[N, {outputs[-1]}]"
            )
        other = targets[(targets != 0) & (targets != 1)]
        if len(other):
            raise BadInput(f"labels hold {other[0].item()}; several labels are 0 or 1 for each")

    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        return torch.zeros(samples, *outputs, dtype=torch.bool)

    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        labels = outputs[-1]
        sizes = {"samples": 1, "exact": 1, **dict.fromkeys(("correct", "counts", "predicted"), labels)}
        check_counts(sums, sizes | dict.fromkeys(("positives", "negatives"), BINS * labels))
        triples = list(zip(sums["correct"], sums["counts"], sums["predicted"], strict=True))
        fits = sums["samples"][0] == samples and sums["exact"][0] <= samples
        fits = fits and sum(sums["positives"]) == sum(sums["counts"])
        fits = fits and sum(sums["positives"]) + sum(sums["negatives"]) == samples * labels
        if not fits or any(right > min(count, said) or max(count, said) > samples for right, count, said in triples):
            raise ValueError("counts that do not fit what it holds out")


def _f1(correct: float, counts: float, predicted: float) -> float | None:
    return 2 * correct / (counts + predicted) if counts + predicted else None
