"""The register of operators: what is found under which name, and what is said where nothing is known."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from strata.core.errors import BadInput
from strata.ops import (
    UNKNOWN,
    Operator,
    SamplesApart,
    elementwise,
    keeps_samples_apart,
    operator_of,
    operators,
    register,
    registered,
)
from strata.ops.channels import name_of
from strata.ops.operator import _RECORDS

aten = torch.ops.aten


def test_names() -> None:
    assert name_of(aten.conv2d.padding) == "conv2d"
    assert name_of(operator.getitem) == "getitem"
    assert name_of("index_select") == "index_select"


def test_an_overload_goes_before_its_family() -> None:
    family, overload = Operator(("relu",)), Operator(("aten::relu.default",))
    with registered(family):
        assert operator_of(aten.relu.default) is family
        assert operator_of(aten.relu_.default) is not family
        with registered(overload):
            assert operator_of(aten.relu.default) is overload
        assert operator_of(aten.relu.default) is family
    assert operator_of(aten.relu.default).channels is elementwise


def test_the_block_ends_with_what_was_known_before_even_after_an_error() -> None:
    before = operators()
    with pytest.raises(KeyError), registered(Operator(("relu", "mylib::new"))):
        raise KeyError
    assert operators() == before


def test_what_is_not_known_says_nothing() -> None:
    assert operator_of(aten.cumsum.default) is UNKNOWN
    assert operator_of(None) is UNKNOWN
    assert UNKNOWN.channels is UNKNOWN.bytes is UNKNOWN.flops is UNKNOWN.resize is UNKNOWN.vectorised is None
    assert UNKNOWN.samples_apart is SamplesApart.NEVER and UNKNOWN.differentiable


@pytest.mark.parametrize("wrong", ["relu", Operator(()), Operator("relu")])  # type: ignore[arg-type]
def test_what_is_no_operator_is_refused(wrong: object) -> None:
    with pytest.raises(BadInput):
        register(wrong)  # type: ignore[arg-type]


def test_byte_rules_may_cover_some_overloads_only() -> None:
    def rule() -> None: ...

    some = Operator(("mean",), bytes=rule, bytes_for=("dim",))
    assert some.byte_rule(aten.mean.dim) is rule and some.byte_rule(aten.mean.default) is None
    assert Operator(("mean",), bytes=rule).byte_rule(aten.mean.default) is rule


class Everywhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x).mean(2).sum(1, keepdim=True)  # apart, apart, apart
        x = x - x.mean(0)  # apart, but for the mean
        x = torch.cat([x, x], 1) + torch.cat([x, x]).mean()  # apart, apart, not, not
        return x.cumsum(1).softmax(-1)  # unknown, apart


def test_where_samples_meet() -> None:
    graph = torch.export.export(Everywhere(), (torch.randn(4, 3, 5),), strict=False).graph
    nodes: list[fx.Node] = [node for node in graph.nodes if node.op == "call_function"]
    found = [(name_of(node.target), keeps_samples_apart(node)) for node in nodes]
    assert found == [
        ("relu", True), ("mean", True), ("sum", True), ("mean", False), ("sub", True), ("cat", True), ("cat", False),
        ("mean", False), ("add", True), ("cumsum", False), ("softmax", True),
    ]  # fmt: skip


def test_no_name_is_in_two_families_and_every_one_is_torchs() -> None:
    for record in operators():
        for name in record.names:
            assert _RECORDS[name] is record, f"{name} is registered twice"
            family, _, overload = name.partition(".")
            exists = hasattr(aten, family) or hasattr(operator, family)
            assert exists, f"torch has no {name}"
            for one in (overload, *record.bytes_for):
                assert not one or one in getattr(aten, family).overloads(), f"{family} has no overload {one}"


def test_operators_that_write_in_place_have_no_more_than_their_plain_forms() -> None:
    """relu_ is cut, counted and vectorised as relu is."""
    for name, record in _RECORDS.items():
        plain = _RECORDS.get(name.removesuffix("_"))
        if name.endswith("_") and plain is not None:
            same = ("channels", "resize", "flops", "samples_apart", "vectorised")
            assert all(getattr(record, field) == getattr(plain, field) for field in same), name
