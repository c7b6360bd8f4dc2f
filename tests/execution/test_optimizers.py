"""Our own SGD against torch's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution import Execution, measure_cut, memory
from strata.execution.measured import growth
from strata.execution.optimizers import SGD, Adam, new_optimizer
from strata.graph import ChannelGraph


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 3, 3, 3), (5,), (4, 11))
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_gradients(them: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in them:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_the_bits_of_torchs_fused_sgd(dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    own = new_optimizer(Execution(momentum=momentum, weight_decay=weight_decay), ours, 0.1)
    torchs = torch.optim.SGD(theirs, 0.1, momentum, weight_decay=weight_decay, fused=True)
    for step in range(4):
        for them, optimizer in ((ours, own), (theirs, torchs)):
            set_gradients(them, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    own.zero_grad()
    assert all(parameter.grad is None for parameter in ours)


def test_rates_are_groups_of_torchs() -> None:
    ours, theirs, rates = parameters(), parameters(), (1.0, 0.5, 0.5)
    own = SGD(ours, 0.1, 0.9, 0.01, rates)
    groups = [
        {"params": [parameter], "lr": 0.1 / rate**2, "weight_decay": 0.01 * rate**2}
        for parameter, rate in zip(theirs, rates, strict=True)
    ]
    torchs = torch.optim.SGD(groups, 0.1, 0.9, fused=True)
    for step in range(3):
        for them, optimizer in ((ours, own), (theirs, torchs)):
            set_gradients(them, step)
            optimizer.step()  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("gradients_last", [True, False])
def test_channels_last_by_the_same_bits_and_without_a_copy(kernel: int, gradients_last: bool) -> None:
    """A gradient that lies otherwise than its parameter is taken as it is."""
    usual = torch.randn(5, 7, kernel, kernel, generator=torch.Generator().manual_seed(0))
    last = torch.channels_last
    ours, theirs = (nn.Parameter(usual.to(memory_format=last)) for _ in range(2))
    own, torchs = SGD([ours], 0.1, 0.9, 0.01), torch.optim.SGD([theirs], 0.1, 0.9, weight_decay=0.01, fused=True)
    for step in range(3):
        gradient = torch.randn(usual.shape, generator=torch.Generator().manual_seed(step))
        for parameter in (ours, theirs):
            parameter.grad = gradient.to(memory_format=last) if gradients_last else gradient.clone()
        torchs.step()
        made = growth(own.step).tensors
        if step and gradients_last:
            assert made == 0
    assert torch.equal(ours, theirs)


def test_a_parameter_whose_first_gradient_comes_later_by_hand() -> None:
    """w = 1, gradient 1, lr 1/4, momentum 1/2: v = 1, then 1.5; the other one begins in the second step."""
    early, late = (nn.Parameter(torch.tensor([1.0])) for _ in range(2))
    optimizer = SGD([early, late], lr=0.25, momentum=0.5, weight_decay=0.0)
    early.grad = torch.ones(1)
    optimizer.step()
    assert (early.item(), late.item()) == (0.75, 1.0)
    early.grad, late.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (early.item(), late.item()) == (0.75 - 0.25 * 1.5, 0.75)

    def momentum(parameter: nn.Parameter) -> Tensor:
        return optimizer.state[parameter]["momentum_buffer"]

    assert (momentum(early).item(), momentum(late).item()) == (1.5, 1.0)


def test_training_loads_no_compiler() -> None:
    """torch._dynamo takes seconds and tens of megabytes of every process that trains."""
    program = """
import sys, torch
from strata.planning.runtime import tiny_step
import strata.training
tiny_step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_the_bits_of_torchs_fused_adam(rule: str, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    execution = Execution(update_rule=rule, momentum=0.8, beta=0.99, eps=1e-6, weight_decay=weight_decay)
    own = new_optimizer(execution, ours, 0.1)
    kind = torch.optim.AdamW if rule == "adamw" else torch.optim.Adam
    torchs = kind(theirs, 0.1, (0.8, 0.99), 1e-6, weight_decay, fused=True)
    for step in range(4):
        for them, optimizer in ((ours, own), (theirs, torchs)):
            set_gradients(them, step)
            if step == 1:
                them[1].grad = None  # it has one step less
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    own.zero_grad()
    assert all(parameter.grad is None for parameter in ours)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_at_a_rate_is_adam_on_the_scaled_weight(decoupled: bool) -> None:
    """w' = w / r with gradient r g: as Adam on w with g, in float64."""
    plain, scaled = parameters(torch.float64), [nn.Parameter(p.detach() / 4) for p in parameters(torch.float64)]
    settings = ((0.9, 0.99), 1e-3, 0.1, decoupled)
    one, other = Adam(plain, 0.1, *settings), Adam(scaled, 0.1, *settings, rates=[4.0] * 3)
    for step in range(3):
        set_gradients(plain, step)
        for a, b in zip(plain, scaled, strict=True):
            assert a.grad is not None
            b.grad = 4 * a.grad
        one.step()
        other.step()
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a, 4 * b)


def test_what_adam_keeps_is_counted() -> None:
    graph = ChannelGraph(
        nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)), (6,)
    )
    for cut in (graph.full(), graph.window(1, 2)):
        execution = Execution(8, update_rule="adamw")
        counted, measured = memory(graph, cut, execution).total, measure_cut(graph, cut, execution).peak
        assert counted == pytest.approx(measured, rel=0.01)
        trained = 4 * sum(torch.Size(cut.shapes[name]).numel() for name in cut.trained)
        assert counted - memory(graph, cut, Execution(8)).total == trained, "one more of each"
    with pytest.raises(BadInput, match="known for sgd, not for adam"):
        Execution(update_rule="adam", momentum_dtype="bfloat16")
