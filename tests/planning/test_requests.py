"""What may be asked of a plan and what may be read as one, on a network of a few hundred parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strata.core.errors import BadInput
from strata.graph import ChannelGraph
from strata.planning.make import plan
from strata.planning.plans import Plan


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(perceptron(), (8,))


def test_numbers_of_any_library() -> None:
    expected = plan(graph(), batch_size=4, budget="1 MB").budget_bytes
    for budget in (1e6, np.int64(10**6), np.float64(1e6), [np.int32(10**6)]):
        assert plan(graph(), batch_size=4, budget=budget).budget_bytes == expected == 10**6
    whole = plan(graph(), batch_size=4, constraint=1.0).hash
    assert plan(graph(), batch_size=4, constraint=np.float32(1)).hash == whole
    assert plan(graph(), batch_size=4, constraint=1.0, micro_batch="2").micro_batch == 2  # type: ignore[arg-type]


def test_the_shape_of_a_graph_may_be_given_again() -> None:
    assert plan(graph(), (8,), 4, budget="1 MB").input_shape == plan(graph(), "8", 4, budget="1 MB").input_shape == (8,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_are_counted_whatever_their_type(dtype: torch.dtype) -> None:
    made = ChannelGraph(
        perceptron().to(dtype), (8,)
    )  # a run would refuse all but float32, and so does a plan of a model
    (step,) = plan(made, (8,), 4, budget="1 MB").steps
    assert step.trained_parameters == 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
    assert step.upload_bytes == dtype.itemsize * step.trained_parameters


def test_a_grouped_convolution_costs_what_it_computes() -> None:
    """8 maps of 4x4 from 3, then 3x3 kernels on each alone: docs/method.md's formula, not FlopCounterMode's."""
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), depthwise, nn.Flatten(), nn.Linear(128, 4))
    (step,) = plan(model, (3, 4, 4), 4, budget="1 MB").steps
    assert step.train_flops_per_sample == 2 * (2 * 3 * 8 * 16) + 3 * (2 * 9 * 8 * 16) + 3 * (2 * 128 * 4)


def test_what_the_user_has_frozen_is_not_paid_for() -> None:
    model = perceptron()
    model[2].weight.requires_grad_(False)
    (whole,) = plan(perceptron(), (8,), 4, budget="1 MB", accounting="paper").steps
    (step,) = plan(model, (8,), 4, budget="1 MB", accounting="paper").steps
    assert step.trained_parameters == whole.trained_parameters - 16 * 16
    assert step.gradients_bytes == whole.gradients_bytes - 4 * 16 * 16
    assert step.train_flops_per_sample == whole.train_flops_per_sample - 2 * 16 * 16


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scale is text": lambda data: data["steps"][0].update(scale="x"),
    "scale of 2": lambda data: data["steps"][0].update(scale=2),
    "k_frozen is null": lambda data: data["steps"][0].update(k_frozen=None),
    "k_frozen above k_trained": lambda data: data["steps"][0].update(k_frozen=data["steps"][0]["k_trained"] + 1),
    "k_frozen below 0": lambda data: data["levels"][1].update(k_frozen=[-1] * len(data["steps"])),
    "a level without k_frozen": lambda data: data["levels"][0].update(k_frozen=[]),
    "micro_batch is text": lambda data: data.update(micro_batch="some"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_plan_is_refused(name: str) -> None:
    made = plan(graph(), batch_size=4, budget=["1 MB", "2 MB"])
    data = made.to_json()
    assert Plan.from_json(data, graph()) == made and Plan.from_json(data, graph()).hash == made.hash
    SPOILT[name](data)
    with pytest.raises(BadInput):
        Plan.from_json(data, graph())
