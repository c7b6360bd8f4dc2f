"""Losses and scores against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data import Classification, Regression
from strata.training.evaluation import EvaluatedBatch, combine


def test_classification_by_hand() -> None:
    outputs = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(3)]])
    targets = torch.tensor([0, 0, 0])
    objective = Classification()
    assert objective.loss(outputs, targets).tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)])
    assert torch.equal(objective.mean_loss(outputs, targets), functional.cross_entropy(outputs, targets))
    sums = objective.sums(outputs, targets)
    assert sums == {"correct": (2, 0), "counts": (3, 0)}
    assert objective.score(sums) == 2 / 3
    assert objective.metrics(sums) == {"per_class_accuracy": [2 / 3, None]}


def test_regression_by_hand() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([1.0, 3.0, 5.0])
    objective = Regression()
    assert objective.loss(outputs, targets).tolist() == [0, 1, 1]
    assert objective.mean_loss(outputs, targets).item() == pytest.approx(2 / 3)
    sums = objective.sums(outputs, targets)
    # squared errors 0 + 1 + 1; around their mean of 3 the targets have 4 + 0 + 4
    assert objective.score(sums) == 1 - 2 / 8
    found = objective.metrics(sums)
    assert found == pytest.approx(
        {"mean_squared_error": 2 / 3, "mean_absolute_error": 2 / 3, "explained_variance": 0.75}
    )
    worse = objective.sums(torch.tensor([[9.0], [9.0], [9.0]]), targets)
    assert objective.score(worse) == 0 and objective.metrics(worse)["explained_variance"] < 0
    same = torch.tensor([2.0, 2.0])
    assert objective.score(objective.sums(same.unsqueeze(1), same)) == 1
    assert objective.score(objective.sums(same.unsqueeze(1) + 1, same)) == 0
    broken = objective.sums(torch.tensor([[math.nan], [1.0], [1.0]]), targets)
    assert objective.score(broken) == 0 and objective.metrics(broken)["mean_squared_error"] is None


def test_several_numbers_for_each_sample() -> None:
    outputs, targets = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[1.0, 10.0], [3.0, 14.0]])
    objective = Regression()
    assert objective.loss(outputs, targets).tolist() == [50, 98]
    # spread: 1 + 1 of the first number, 4 + 4 of the second
    assert objective.metrics(objective.sums(outputs, targets))["explained_variance"] == 1 - 296 / 10


@pytest.mark.parametrize("objective", [Classification(), Regression()])
def test_parts_add_up_in_any_order(objective: Classification | Regression) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(30, 1 if isinstance(objective, Regression) else 4, generator=generator)
    targets = torch.randint(4, (30,), generator=generator)
    targets = targets.float() if isinstance(objective, Regression) else targets
    parts = [
        EvaluatedBatch(number, len(y), objective.loss(x, y).sum().item(), objective.sums(x, y))
        for number, (x, y) in enumerate(zip(outputs.split(8), targets.split(8), strict=True))
    ]
    found = combine(parts[::-1], "batch", objective)
    assert found == combine(parts, "batch", objective)
    assert found.accuracy == pytest.approx(objective.score(objective.sums(outputs, targets)))
    assert found.loss == pytest.approx(objective.mean_loss(outputs, targets).item())


@pytest.mark.parametrize(
    ("objective", "targets", "outputs", "said"),
    [
        (Classification(), torch.tensor([0.0, 1.0]), (2,), "float32 of shape .2,.; classes are whole numbers"),
        (Classification(), torch.tensor([[0], [1]]), (2,), "classes are whole numbers"),
        (Classification(), torch.tensor([0, 2]), (2,), "labels run from 0 to 2; with 2 classes.* within 0 to 1"),
        (Classification(), torch.tensor([-1, 0]), (2,), "labels run from -1"),
        (Regression(), torch.tensor([1, 2]), (1,), "int64 of shape .2,.; regression learns floating point"),
        (Regression(), torch.tensor([1.0, math.inf]), (1,), "not finite"),
        (Regression(), torch.zeros(5, 3), (2,), r"\(5, 3\); the model's outputs are \[N, 2\]"),
        (Regression(), torch.zeros(5), (2,), "give both one shape"),
    ],
)
def test_targets_that_an_objective_cannot_represent(
    objective: Classification | Regression, targets: torch.Tensor, outputs: tuple[int, ...], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        objective.check(targets, outputs)


def test_targets_that_it_can() -> None:
    Classification().check(torch.tensor([0, 1]), (2,))
    Regression().check(torch.zeros(4), (1,))
    Regression().check(torch.zeros(4, 1), (1,))
    Regression().check(torch.zeros(4, 3), (3,))


def test_sums_that_a_device_made_up() -> None:
    good = Regression().sums(torch.zeros(3, 1), torch.ones(3))
    Regression().check_sums(good, 3, (1,))
    for wrong in ({"samples": (4,)}, {"squared": (math.nan,)}, {"squared": (-1.0,)}, {"squared": ()}, {"more": (1,)}):
        with pytest.raises(ValueError):
            Regression().check_sums({**good, **wrong}, 3, (1,))
    counts = {"correct": (1, 0), "counts": (2, 1)}
    Classification().check_sums(counts, 3, (2,))
    for wrong in (
        {"correct": (3, 0)},
        {"counts": (2, 2)},
        {"correct": (True, 0)},
        {"correct": (1, 0, 0)},
        {"more": ()},
    ):
        with pytest.raises(ValueError):
            Classification().check_sums({**counts, **wrong}, 3, (2,))
