"""What a model is to do with its inputs: the loss of each sample, and a headline score from 0 to 1.

A score is made of sums over samples, so that parts of a data set may be judged anywhere, in any order, and add up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from strata.core.errors import BadInput

Sums = Mapping[str, tuple[float, ...]]  # by name; whole numbers where they are counts
IGNORED = -100  # a target that counts for nothing, such as padding: torch's cross_entropy calls it so too
MOST_UNSEEN, MOST_FOLD = 1000, 10  # classes that are not asked for: more, and so many times those that occur, are ids
BINS = 256  # of a probability: an area under the ROC curve is of counts in these, so that parts of a data set add up


@dataclass(frozen=True)
class Objective(ABC):
    """Subclass it for targets of another kind. Objectives are compared and hashed by their fields.

    >>> class Ordinal(Classification):
    ...     def loss(self, outputs, targets):
    ...         return super().loss(outputs, targets) * (1 + (outputs.argmax(1) - targets).abs())
    """

    name: ClassVar[str]
    largest_loss: ClassVar[float] = 1e6  # of a device's update that is believed: more would only spoil the round's mean

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[batch]: of each sample."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What training descends: the mean of `loss`, maybe written as one operation."""
        return self.loss(outputs, targets).mean()

    def of_device(self, targets: Tensor, outputs: int) -> Objective:
        """The objective of a device that holds samples with these targets, for a model of so many scores."""
        return self

    @property
    def unheld(self) -> tuple[int, ...]:
        """Rows of a classifier that such a device leaves as they are."""
        return ()

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        """What `score` and `metrics` are made of, summed over these samples."""

    @abstractmethod
    def score(self, sums: Sums) -> float:
        """The headline, from 0 to 1 (metrics.jsonl calls it accuracy)."""

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """What is said beside the score: numbers go under `metrics`, lists to summary.json alone."""
        return {}

    def suits(self, outputs: Sequence[int], classes: int, targets: Sequence[int]) -> bool:
        """Whether a model with outputs [batch, *outputs] learns targets [N, *targets] of so many classes or numbers."""
        return outputs[-1] == classes

    @abstractmethod
    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        """Refuses targets that a model with outputs [batch, *outputs] cannot learn; nothing is converted."""

    @abstractmethod
    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        """Targets of the right kind, to measure a step with."""

    @abstractmethod
    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        """ValueError unless these can be the sums over so many samples: a device of a fleet may write anything."""


@dataclass(frozen=True)
class Classification(Objective):
    """Cross-entropy over classes 0 to n - 1; the score is accuracy."""

    name: ClassVar[str] = "classification"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        right = targets[outputs.argmax(1) == targets]
        correct, counts = (torch.bincount(part, minlength=outputs.shape[1]).tolist() for part in (right, targets))
        predicted = torch.bincount(outputs.argmax(1), minlength=outputs.shape[1]).tolist()
        found = {"correct": tuple(correct), "counts": tuple(counts), "predicted": tuple(predicted)}
        if outputs.shape[1] == 2:
            found |= binned(outputs.softmax(1)[:, 1:], targets.unsqueeze(1) == 1)
        return found

    def score(self, sums: Sums) -> float:
        return sum(sums["correct"]) / sum(sums["counts"])

    def metrics(self, sums: Sums) -> dict[str, Any]:
        area = {"auc": mean_of(areas(sums))} if "positives" in sums else {}
        return {"per_class_accuracy": list(per_class(sums)), "f1": macro_f1(sums), **area}

    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        if targets.dtype != torch.int64 or targets.dim() != 1:
            raise BadInput(
                f"labels are {kind_of(targets)}; classes are whole numbers, int64 [N]: convert them, or give an "
                "objective that suits them, such as strata.data.Regression()"
            )
        low, high, classes = int(targets.min()), int(targets.max()), outputs[-1]
        if low < 0 or high >= classes:
            raise BadInput(
                f"labels run from {low} to {high}; with {classes} classes they should be within 0 to {classes - 1}"
            )

    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64)

    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        sizes = dict.fromkeys(("correct", "counts", "predicted"), outputs[-1])
        if outputs[-1] == 2:
            sizes |= dict.fromkeys(("positives", "negatives"), BINS)
        check_counts(sums, sizes)
        check_classes(sums, samples)
        if outputs[-1] == 2 and (sum(sums["positives"]), sum(sums["negatives"])) != tuple(sums["counts"][::-1]):
            raise ValueError("counts that do not fit what it holds out")


@dataclass(frozen=True)
class MaskedClassification(Classification):
    """Classification on a device that does not hold every class: scores of the others count as zero, whatever they are,
    so nothing is learnt of them (Diao et al., HeteroFL, ICLR 2021)."""

    masked: tuple[int, ...] = ()

    def of_device(self, targets: Tensor, outputs: int) -> Objective:
        held = set(torch.unique(targets).tolist())
        return MaskedClassification(tuple(number for number in range(outputs) if number not in held))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(self._without(outputs), targets)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().mean_loss(self._without(outputs), targets)

    def _without(self, outputs: Tensor) -> Tensor:
        mask = torch.zeros(outputs.shape[1], dtype=torch.bool, device=outputs.device)
        mask[list(self.masked)] = True
        return outputs.masked_fill(mask, 0.0)

    @property
    def unheld(self) -> tuple[int, ...]:
        return self.masked


def per_class(sums: Sums) -> tuple[float | None, ...]:
    """Accuracy of each class; None for a class without samples."""
    pairs = zip(sums["correct"], sums["counts"], strict=True)
    return tuple(right / count if count else None for right, count in pairs)


def macro_f1(sums: Sums) -> float | None:
    """The mean over classes that occur of 2 TP / (2 TP + FP + FN)."""
    triples = zip(sums["correct"], sums["counts"], sums["predicted"], strict=True)
    return mean_of([2 * right / (count + predicted) if count else None for right, count, predicted in triples])


def mean_of(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def binned(probabilities: Tensor, right: Tensor) -> dict[str, tuple[int, ...]]:
    """[N, labels] each -> how many with the label, and without it, have a probability within each of BINS bins."""
    places = (probabilities.double().nan_to_num() * BINS).long().clamp(0, BINS - 1)
    labels = places.shape[1]
    places = places + BINS * torch.arange(labels, device=places.device)
    return {
        name: tuple(torch.bincount(places[chosen], minlength=BINS * labels).tolist())
        for name, chosen in (("positives", right), ("negatives", ~right))
    }


def areas(sums: Sums) -> list[float | None]:
    """Of each label, the area under its ROC curve: the share of pairs of one with the label and one without it that
    the model puts in the right order, where those of one bin count half. None: there is no such pair."""
    positives, negatives = (torch.tensor(sums[name]).view(-1, BINS).double() for name in ("positives", "negatives"))
    below = negatives.cumsum(1) - negatives / 2
    ordered, pairs = (positives * below).sum(1), positives.sum(1) * negatives.sum(1)
    return [right / count if count else None for right, count in zip(ordered.tolist(), pairs.tolist(), strict=True)]


def check_counts(sums: Sums, sizes: Mapping[str, int]) -> None:
    """ValueError unless these are counts, so many of each name."""
    if {name: len(values) for name, values in sums.items()} != dict(sizes):
        raise ValueError("no counts per class")
    if not all(type(value) is int and value >= 0 for values in sums.values() for value in values):
        raise ValueError("counts that are none")


def check_classes(sums: Sums, most: int, least: int | None = None) -> None:
    """ValueError unless the classes of `least` (None: `most`) to `most` things were counted once each."""
    least = most if least is None else least
    total = sum(sums["counts"])
    if not least <= total <= most or sum(sums["predicted"]) != total:
        raise ValueError("counts that do not fit what it holds out")
    triples = zip(sums["correct"], sums["counts"], sums["predicted"], strict=True)
    if any(right > min(count, predicted) for right, count, predicted in triples):
        raise ValueError("counts that do not fit what it holds out")


@dataclass(frozen=True)
class Regression(Objective):
    """Squared error of numbers, [N] or [N, outputs]. The score is the share of the targets' variance that the model
    explains (R²), and 0 where it does worse than their mean."""

    name: ClassVar[str] = "regression"
    largest_loss: ClassVar[float] = 1e18  # squares of whatever unit the targets have

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.reshape(outputs.shape)).square().flatten(1).mean(1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        values = targets.reshape(outputs.shape).double()
        errors = outputs.double() - values
        return {
            "samples": (len(targets),),
            "absolute": tuple(errors.abs().sum(0).flatten().tolist()),
            "squared": tuple(errors.square().sum(0).flatten().tolist()),
            "targets": tuple(values.sum(0).flatten().tolist()),
            "squared_targets": tuple(values.square().sum(0).flatten().tolist()),
        }

    def score(self, sums: Sums) -> float:
        explained = self._explained(sums)
        return min(1.0, max(0.0, explained)) if math.isfinite(explained) else 0.0

    def metrics(self, sums: Sums) -> dict[str, Any]:
        count = sums["samples"][0] * len(sums["squared"])
        found = {
            "mean_squared_error": sum(sums["squared"]) / count,
            "mean_absolute_error": sum(sums["absolute"]) / count,
            "explained_variance": self._explained(sums),  # as it is: it may be below 0
        }
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _explained(self, sums: Sums) -> float:
        samples = sums["samples"][0]
        pairs = zip(sums["targets"], sums["squared_targets"], strict=True)
        spread = sum(squares - total * total / samples for total, squares in pairs)
        error = sum(sums["squared"])
        if spread <= 0:  # all targets are the same
            return 1.0 if error == 0 else 0.0
        return 1 - error / spread

    def check(self, targets: Tensor, outputs: Sequence[int]) -> None:
        if not targets.is_floating_point():
            raise BadInput(f"targets are {kind_of(targets)}; regression learns floating point numbers: give .float()")
        if not bool(torch.isfinite(targets).all()):
            raise BadInput("targets have values that are not finite")
        if tuple(targets.shape[1:]) != tuple(outputs) and (targets.dim() != 1 or math.prod(outputs) != 1):
            wanted = ", ".join(["N", *map(str, outputs)])
            raise BadInput(f"targets are {kind_of(targets)}; the model's outputs are [{wanted}]: give both one shape")

    def example(self, samples: int, outputs: Sequence[int]) -> Tensor:
        return torch.zeros(samples, *outputs)

    def check_sums(self, sums: Sums, samples: int, outputs: Sequence[int]) -> None:
        each = dict.fromkeys(("absolute", "squared", "targets", "squared_targets"), math.prod(outputs))
        if {name: len(values) for name, values in sums.items()} != {"samples": 1, **each}:
            raise ValueError("no sums of errors")
        if sums["samples"][0] != samples:
            raise ValueError("sums that do not fit what it holds out")
        values = [value for numbers in sums.values() for value in numbers]
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError("sums that are not finite")
        if any(value < 0 for name in ("absolute", "squared", "squared_targets") for value in sums[name]):
            raise ValueError("sums of squares that are negative")


def classes_seen(numbers: Tensor, say: str) -> int:
    """How many classes whole numbers stand for: up to the largest. Ids would make millions that no network learns.
    `say`: how the number of classes is given."""
    seen = numbers[numbers != IGNORED]
    classes = int(seen.max()) + 1 if len(seen) else 1
    distinct = len(torch.unique(seen))
    if classes > MOST_UNSEEN and classes > MOST_FOLD * distinct:
        raise BadInput(
            f"labels are whole numbers up to {classes - 1}, which makes {classes} classes, and {distinct} of them "
            f"occur: number them from 0 on, or give names; where there are so many, say so with {say}{classes}"
        )
    return classes


def kind_of(targets: Tensor) -> str:
    return f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"
