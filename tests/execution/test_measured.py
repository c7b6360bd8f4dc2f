from __future__ import annotations

import gc

import torch
from torch import nn

from strata.execution import measure, measure_step
from strata.execution.execution import Execution
from strata.execution.measured import growth, live_bytes
from tests.networks import NETWORKS, mobilenet

torch.set_num_threads(1)
KIB = 1024


def test_growth_is_the_highest_rise_of_live_bytes() -> None:
    kept = []

    def step() -> None:
        first = torch.empty(256)  # 1 KiB
        second = torch.empty(512)  # 3 KiB live
        del first
        kept.append(torch.empty(128))  # 2.5 KiB
        del second

    found = growth(step)
    assert found.tensors == found.allocated == 3 * KIB


def test_garbage_of_earlier_work_is_not_freed_meanwhile() -> None:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000)
    try:

        def leave_garbage() -> None:  # the profiler knows what was allocated under its eyes, and sees it go
            garbage: list[object] = [torch.empty(1000)]
            garbage.append(garbage)

        growth(leave_garbage)

        def step() -> None:
            gc.set_threshold(1)  # the next new containers would collect it
            _ = [[] for _ in range(100)]
            torch.empty(10)

        assert growth(step).tensors == 40
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


def test_temporaries_inside_operators_count() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    y = x.sigmoid() + 1

    # grad / (2 * result): a temporary beside the result, then the gradient that x keeps
    found = growth(lambda: y.sqrt().sum().backward())
    assert found.tensors >= 3 * x.nbytes


def test_views_and_shared_storages_count_once() -> None:
    x = torch.zeros(100)
    assert live_bytes([x, x[10:], x.view(10, 10)]) == 400


def test_a_linear_layer_by_hand() -> None:
    """Linear(10, 100), no bias, batch 2: weights, momentum and gradient, 4000 bytes each; weight decay copies none."""
    found = measure(nn.Linear(10, 100, bias=False), (10,), Execution(2), classes=100)
    assert found.standing == 2 * 4000 + 2 * 10 * 4 + 2 * 8
    assert (
        found.peak == found.standing + 4000 + 2 * 100 * 4 + 4 + 4
    )  # gradients of weights and scores; loss and its own
    assert found.scratch == 0 and found.allocated == found.peak
    without = measure(nn.Linear(10, 100, bias=False), (10,), Execution(2, momentum=0.0), classes=100)
    assert without.peak == found.peak - 4000


def test_frozen_parameters_have_neither_gradient_nor_momentum() -> None:
    model = nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 10))
    before = measure(model, (10,), Execution(2), classes=10)
    model[0].requires_grad_(False)
    after = measure(model, (10,), Execution(2), classes=10)
    assert before.standing - after.standing == 4 * 11_000
    # backward through the first layer: all gradients, that of its outputs, the loss and its own
    assert before.peak - before.standing == 4 * 21_010 + 2 * 1000 * 4 + 8
    # through the second: its gradients, what it took in, those of the scores, the loss and its own
    assert after.peak - after.standing == 4 * 10_010 + 2 * 1000 * 4 + 2 * 10 * 4 + 8


def test_the_module_is_left_as_it_was() -> None:
    model, shape = mobilenet()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    first = measure(model, shape, Execution(4), classes=10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert measure(model, shape, Execution(4), classes=10) == first


def test_scratch_of_the_convolution_library_is_kept_apart() -> None:
    """A depthwise 7x7 convolution on tiny images: what oneDNN takes is no property of the model."""
    depthwise = nn.Conv2d(64, 64, 7, padding=3, groups=64)
    model = nn.Sequential(nn.Conv2d(3, 64, 1), depthwise, nn.Flatten(), nn.Linear(1024, 10))
    found = measure(model, (3, 4, 4), Execution(2), classes=10)
    assert found.allocated == found.peak + found.scratch
    value = 2 * 64 * 4 * 4 * 4
    parameters = live_bytes(model.parameters())
    assert found.peak < 3 * parameters + 6 * value + 4 * 64 * 50  # no copies in other layouts


def test_one_step_of_a_training_run() -> None:
    model, shape = NETWORKS["resnet20"]()
    x, y = torch.randn(4, *shape), torch.randint(10, (4,))
    found = measure_step(lambda: nn.functional.cross_entropy(model(x), y).backward(), [*model.parameters(), x, y])
    assert found.peak > found.standing == live_bytes([*model.parameters(), x, y])
