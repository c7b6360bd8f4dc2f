"""Losses and scores against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data import (
    IGNORED,
    Classification,
    MultiLabel,
    NextToken,
    Objective,
    PerPosition,
    Regression,
    objective_named,
)
from strata.training.evaluation import EvaluatedBatch, combine


def test_classification_by_hand() -> None:
    outputs = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(3)]])
    targets = torch.tensor([0, 0, 0])
    objective = Classification()
    assert objective.loss(outputs, targets).tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)])
    assert torch.equal(objective.mean_loss(outputs, targets), functional.cross_entropy(outputs, targets))
    sums = objective.sums(outputs, targets)
    assert {name: sums[name] for name in ("correct", "counts", "predicted")} == {
        "correct": (2, 0),
        "counts": (3, 0),
        "predicted": (2, 1),
    }
    assert objective.score(sums) == 2 / 3
    # F1 of class 0: 2 * 2 / (3 + 2); class 1 does not occur, so there is no pair to order either
    assert objective.metrics(sums) == {"per_class_accuracy": [2 / 3, None], "f1": 0.8, "auc": None}


def test_two_classes_have_an_area_under_the_curve() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4])
    outputs = torch.stack([(1 - probabilities).log(), probabilities.log()], 1)
    sums = Classification().sums(outputs, torch.tensor([0, 0, 1, 1, 1]))
    # pairs (with, without): 0.35 beats 0.1; 0.8 beats both; 0.4 beats 0.1 and ties with 0.4
    assert Classification().metrics(sums)["auc"] == (1 + 2 + 1.5) / 6
    assert Classification().metrics(sums)["f1"] == pytest.approx((2 * 2 / (2 + 4) + 2 * 1 / (3 + 1)) / 2)


def test_several_labels_by_hand() -> None:
    outputs = torch.tensor([[math.log(3), -1.0], [math.log(3), math.log(3)], [-2.0, -2.0]])
    targets = torch.tensor([[1, 0], [0, 1], [1, 0]])
    objective = MultiLabel()
    first = (math.log(4 / 3) + math.log(1 + math.exp(-1))) / 2
    assert objective.loss(outputs, targets)[:2].tolist() == pytest.approx([first, (math.log(4) + math.log(4 / 3)) / 2])
    assert torch.equal(objective.loss(outputs, targets), objective.loss(outputs, targets.float()))
    sums = objective.sums(outputs, targets)
    # the first label: 1 right of 2, 2 predicted; the second: 1 of 1, 1 predicted
    assert (sums["correct"], sums["counts"], sums["predicted"], sums["exact"]) == ((1, 1), (2, 1), (2, 1), (1,))
    assert objective.score(sums) == 2 * 2 / (3 + 3)
    found = objective.metrics(sums)
    assert found["f1_of_labels"] == [0.5, 1.0] and found["f1_macro"] == 0.75 and found["exact"] == 1 / 3
    assert found["auc"] == pytest.approx((0.25 + 1) / 2)  # the first: one pair ties, the other is in the wrong order
    nothing = objective.sums(-torch.ones(2, 2), torch.zeros(2, 2))
    assert objective.score(nothing) == 1 and objective.metrics(nothing)["auc"] is None


def test_positions_by_hand() -> None:
    """Two tags; the last position of the second sample is padding."""
    outputs = torch.tensor([[[math.log(3), 0.0], [0.0, math.log(3)]], [[math.log(3), 0.0], [9.0, -9.0]]])
    targets = torch.tensor([[0, 0], [1, IGNORED]])
    objective = PerPosition()
    assert objective.loss(outputs, targets).tolist() == pytest.approx(
        [(math.log(4 / 3) + math.log(4)) / 2, math.log(4)]
    )
    sums = objective.sums(outputs, targets)
    assert sums == {"correct": (1, 0), "counts": (2, 1), "predicted": (2, 1)}
    assert objective.score(sums) == 1 / 3
    found = objective.metrics(sums)
    assert found["iou"] == [1 / 3, 0.0] and found["mean_iou"] == 1 / 6 and found["f1"] == 0.25
    pictures = outputs.permute(0, 2, 1).unsqueeze(2)  # [2, classes, 1, 2]
    assert torch.equal(objective.loss(pictures, targets.unsqueeze(1)), objective.loss(outputs, targets))
    assert objective.sums(pictures, targets.unsqueeze(1)) == sums
    padding = objective.loss(outputs, torch.full((2, 2), IGNORED))
    assert padding.tolist() == [0, 0]


def test_tokens_by_hand() -> None:
    outputs = torch.zeros(2, 2, 4)
    outputs[0, 0, 2] = math.log(5)  # 5/8
    targets = torch.tensor([[2, 3], [0, IGNORED]])
    objective = NextToken()
    first = (math.log(8 / 5) + math.log(4)) / 2
    assert objective.loss(outputs, targets).tolist() == pytest.approx([first, math.log(4)])
    assert objective.mean_loss(outputs, targets).item() == pytest.approx((first + math.log(4)) / 2)
    sums = objective.sums(outputs, targets)
    assert sums["correct"] == (2,) and sums["tokens"] == (3,)  # of equal scores the first one is taken
    assert objective.score(sums) == 2 / 3
    assert objective.metrics(sums)["perplexity"] == pytest.approx((8 / 5 * 4 * 4) ** (1 / 3))
    assert objective.metrics({**sums, "nll": (1e9,)}) == {"perplexity": None}
    assert objective.metrics({**sums, "nll": (math.nan,)}) == {"perplexity": None}


def test_which_models_suit() -> None:
    assert PerPosition().suits((7, 3), 3, (7,)) and PerPosition().suits((3, 8, 8), 3, (8, 8))
    assert not PerPosition().suits((7, 3), 3, (6,)) and not PerPosition().suits((3,), 3, (7,))
    assert NextToken().suits((7, 512), 500, (7,)) and not NextToken().suits((7, 499), 500, (7,))
    assert MultiLabel().suits((4,), 4, (4,)) and not MultiLabel().suits((4, 4), 4, (4,))


def test_objectives_by_name() -> None:
    assert [objective_named(name) for name in ("multi-label", "next-token")] == [MultiLabel(), NextToken()]
    assert objective_named("strata.data:PerPosition") == PerPosition()
    with pytest.raises(BadInput, match="there is no objective 'classify': choose classification, multi-label, regr"):
        objective_named("classify")
    with pytest.raises(BadInput, match="is not a class made from strata.data.Objective"):
        objective_named("strata.data:Samples")


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
        (MultiLabel(), torch.tensor([[0, 2]]), (2,), "labels hold 2; several labels are 0 or 1"),
        (MultiLabel(), torch.tensor([[0.0, 0.5]]), (2,), "labels hold 0.5; several labels are 0 or 1"),
        (MultiLabel(), torch.tensor([0, 1]), (2,), r"are 0 or 1 for each, \[N, 2\]"),
        (PerPosition(), torch.tensor([0, 1]), (2,), r"per-position classes are whole numbers, int64 \[N, positions\]"),
        (PerPosition(), torch.tensor([[0.0, 1.0]]), (2,), "whole numbers"),
        (PerPosition(), torch.tensor([[0, 2]]), (5, 2), "run from 0 to 2; with 2 classes .* or -100 for padding"),
        (PerPosition(), torch.tensor([[0, -1]]), (2,), "run from -1 to 0"),
        (PerPosition(), torch.full((1, 2), IGNORED), (2,), "there is nothing to learn"),
        (NextToken(), torch.zeros(1, 2, 2, dtype=torch.int64), (2,), r"tokens to predict are \[N, positions\]"),
    ],
)
def test_targets_that_an_objective_cannot_represent(
    objective: Objective, targets: torch.Tensor, outputs: tuple[int, ...], said: str
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
    counts = {"correct": (1, 0, 0), "counts": (2, 1, 0), "predicted": (1, 1, 1)}
    Classification().check_sums(counts, 3, (3,))
    for wrong in (
        {"correct": (2, 0, 0)},
        {"counts": (2, 2, 0)},
        {"correct": (True, 0, 0)},
        {"correct": (1, 0)},
        {"more": ()},
        {"predicted": (1, 1, 0)},
    ):
        with pytest.raises(ValueError):
            Classification().check_sums({**counts, **wrong}, 3, (3,))


def test_sums_of_the_other_objectives_that_a_device_made_up() -> None:
    two = Classification().sums(torch.eye(2), torch.tensor([0, 1]))
    Classification().check_sums(two, 2, (2,))
    labels = MultiLabel().sums(torch.eye(2), torch.eye(2))
    MultiLabel().check_sums(labels, 2, (2,))
    tags = PerPosition().sums(torch.zeros(2, 3, 2), torch.zeros(2, 3, dtype=torch.int64))
    PerPosition().check_sums(tags, 2, (3, 2))
    tokens = NextToken().sums(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    NextToken().check_sums(tokens, 2, (3, 4))
    cases: list[tuple[Objective, dict[str, tuple[float, ...]], tuple[int, ...], dict[str, tuple[float, ...]]]] = [
        (Classification(), {**two}, (2,), {"positives": (2, *two["positives"][1:])}),
        (MultiLabel(), {**labels}, (2,), {"exact": (3,)}),
        (MultiLabel(), {**labels}, (2,), {"predicted": (3, 1)}),
        (PerPosition(), {**tags}, (3, 2), {"counts": (7, 0), "predicted": (7, 0)}),
        (NextToken(), {**tokens}, (3, 4), {"tokens": (7,)}),
        (NextToken(), {**tokens}, (3, 4), {"nll": (math.nan,)}),
    ]
    for objective, good, outputs, wrong in cases:
        with pytest.raises(ValueError):
            objective.check_sums({**good, **wrong}, 2, outputs)
