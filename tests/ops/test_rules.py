"""Rules of single operators by hand. Whole networks are held against real training in tests/execution/test_peak.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata.ops import Count, NoRule, Simulation, SizedOp, Value, operator_of
from strata.ops.bytes import simulate
from strata.ops.tape import STANDING

aten = torch.ops.aten
FLOAT = torch.float32


def sized(target: Any, shape: Any, requires_grad: bool = True, name: str = "y") -> SizedOp:
    return SizedOp(name, "op", target, (), (), {}, shape, FLOAT, requires_grad)


def parameter(*shape: int, storage: int = STANDING) -> Value:
    """By the storage one parameter is told from another."""
    value = Value(storage, shape)
    value.requires_grad = value.parameter = True
    return value


def applied(sim: Simulation, target: Any, shape: Any, *arguments: Any) -> Any:
    return simulate(sim, sized(target, shape), arguments, {})


def test_relu_keeps_its_result_and_in_place_makes_none() -> None:
    x = parameter(10, 10)
    sim = Simulation(0)
    y = applied(sim, aten.relu.default, (10, 10), x)
    sim.drop(y)
    assert sim.live == 400  # held for backward
    sim = Simulation(0)
    x = sim.new((10, 10))
    x.requires_grad = True
    y = applied(sim, aten.relu_.default, (10, 10), x)
    assert sim.live == sim.peak == 400 and y.storage == x.storage


def test_silu_in_place_keeps_a_copy_of_what_it_overwrites() -> None:
    sim = Simulation(0)
    x = sim.new((10, 10))
    x.requires_grad = True
    applied(sim, aten.silu_.default, (10, 10), x)
    assert sim.live == 800


def test_a_linear_layer_keeps_what_its_gradients_need() -> None:
    for x_needs, weight_needs, kept in ((True, True, 320), (False, True, 320), (True, False, 0), (False, False, 0)):
        sim = Simulation(0)
        x, weight = sim.new((8, 10)), Value(STANDING, (5, 10))
        x.requires_grad, weight.requires_grad = x_needs, weight_needs
        y = applied(sim, aten.linear.default, (8, 5), x, weight)
        sim.drop(y)
        sim.drop(x)
        assert sim.live == kept


def test_forward_and_backward_of_a_product_by_hand() -> None:
    """y = a @ b, loss = y: gradients of both factors, while y's own is there."""
    sim = Simulation(0)
    a, b = parameter(4, 6, storage=sim.allocate(0)), parameter(6, 5, storage=sim.allocate(0))
    y = applied(sim, aten.mm.default, (4, 5), a, b)
    sim.run_backward(y)
    assert sim.peak == 80 + 80 + 96 + 120  # y, its gradient, those of a and b
    assert sim.live == sim.parameter_gradients == 96 + 120


def test_a_rule_that_is_missing_or_does_not_cover_a_use_says_so() -> None:
    sim = Simulation(0)
    with pytest.raises(NoRule, match="cumsum"):
        applied(sim, aten.cumsum.default, (3,), parameter(3), 0)
    with pytest.raises(NoRule, match="broadcasting"):
        applied(sim, aten.matmul.default, (2, 3, 5), parameter(2, 3, 4), parameter(4, 5))
    with pytest.raises(NoRule, match="mean.out"):
        applied(sim, aten.mean.out, (3,), parameter(3, 4))


def counted(target: Any, out: SizedOp, *inputs: Any) -> Count:
    rule = operator_of(target).flops
    assert rule is not None
    return rule(out, *inputs)


def test_flops_of_a_convolution_by_hand() -> None:
    """8 -> 16 channels, 3x3, on 10x10 positions of 2 samples: 2 x 9 x 8 x 16 x 100 x 2."""
    target = aten.conv2d.default
    out, x, bias = sized(target, (2, 16, 10, 10)), sized(None, (2, 8, 12, 12), False), sized(None, (16,))
    weight = sized(None, (16, 8, 3, 3))
    assert counted(target, out, x, weight, bias, [1, 1]) == Count(460_800, 2 * 460_800)
    # in 4 groups a quarter; torch counts the weight's gradient as if there were none
    grouped = sized(None, (16, 2, 3, 3))
    assert counted(target, out, x, grouped) == Count(115_200, 2 * 115_200 + 3 * 115_200, grouped_excess=3 * 115_200)


def test_flops_of_products_by_hand() -> None:
    a, b = sized(None, (2, 4, 6)), sized(None, (2, 6, 5), False)
    out = sized(aten.bmm.default, (2, 4, 5))
    assert counted(aten.bmm.default, out, a, b) == Count(2 * 2 * 4 * 6 * 5, 2 * 2 * 2 * 4 * 6 * 5)
    assert counted(aten.baddbmm.default, out, out, a, b) == counted(aten.bmm.default, out, a, b)
    assert counted(aten.relu.default, out, a) == Count()


def test_flops_of_attention_by_hand() -> None:
    """2 heads of 3 queries, 5 keys, width 4: two products of 2 x 2 x 3 x 5 x 4; backward makes five."""
    query, key = sized(None, (1, 2, 3, 4)), sized(None, (1, 2, 5, 4))
    out = sized(aten.scaled_dot_product_attention.default, (1, 2, 3, 4))
    found = counted(out.target, out, query, key, key, None, 0.0)
    assert found == Count(attention_forward=2 * 240, attention_train=7 * 240)
