"""The proven properties of a cut, in float64, for every network and every kind of cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strata.graph import ChannelGraph, Cut
from tests.graph.reference import assert_equals_zeroed, block_mask
from tests.networks import NAMES, NETWORKS, graph_of

CUTS: dict[str, Callable[[ChannelGraph], Cut]] = {
    "prefix": lambda g: g.prefix(0.25),
    "rolling": lambda g: g.rolling(0.5, 13),
    "random": lambda g: g.random(0.3, torch.Generator().manual_seed(5)),
    "slt-start": lambda g: g.slt(0, 0, 0.2),
    "slt-early": lambda g: g.slt(1, 2, 0.3),
    "slt-middle": lambda g: g.slt(g.depth // 2 - 1, g.depth // 2, 0.4),
    "slt-deep-head": lambda g: g.slt(0, g.depth // 2, 0.4),
    "slt-last": lambda g: g.slt(g.depth - 1, g.depth, 1),
}


class NoDropout(TorchFunctionMode):
    """Which units are dropped depends on the width."""

    DROPOUTS = (functional.dropout, torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return args[0] if func in self.DROPOUTS else func(*args, **(kwargs or {}))


ALWAYS = ("prefix", "random", "slt-middle")


def some_cuts() -> list[tuple[str, str]]:
    """Every network with ALWAYS and two of the others in turn: each of those meets five networks or more."""
    others = cycle(kind for kind in CUTS if kind not in ALWAYS)
    return [(name, kind) for name in NAMES for kind in (*ALWAYS, next(others), next(others))]


@cache
def built(name: str) -> tuple[nn.Module, ChannelGraph, tuple[int, ...]]:
    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model.double(), graph_of(name), shape


@pytest.mark.parametrize(("name", "kind"), some_cuts())
def test_submodel_equals_the_full_model_with_dropped_coordinates_zeroed(name: str, kind: str) -> None:
    model, graph, _ = built(name)
    cut = CUTS[kind](graph)
    with NoDropout():
        assert_equals_zeroed(model, graph, cut)


@pytest.mark.parametrize("name", NAMES)
def test_scale_one_is_the_original_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    graph = graph_of(name)
    cut = graph.full()
    assert cut == graph.prefix(1.0) == graph.rolling(1.0, 3) == graph.slt(0, 0, 1.0)
    x, y = torch.randn(4, *shape), torch.tensor([3, 1, 0, 7])
    sub = graph.submodel(cut, cut.extract(model.state_dict()))
    assert list(sub.state_dict()) == list(model.state_dict())
    original = copy.deepcopy(model)
    for training in (True, False):
        outputs = []
        for one in (sub, original):
            one.train(training)
            torch.manual_seed(9)  # dropout
            outputs.append(one(x))
        assert torch.equal(*outputs)
        if training:
            for output in outputs:
                functional.cross_entropy(output, y).backward()
    for (n, a), (m, b) in zip(sub.named_parameters(), original.named_parameters(), strict=True):
        assert n == m and (a.grad is b.grad is None or torch.equal(a.grad, b.grad)), n
    for (n, a), (m, b) in zip(sub.named_buffers(), original.named_buffers(), strict=False):
        assert n == m and torch.equal(a, b), n


@pytest.mark.parametrize(("name", "kind"), some_cuts())
def test_extract_then_scatter_touches_exactly_the_cuts_coordinates(name: str, kind: str) -> None:
    model, graph, _ = built(name)
    cut = CUTS[kind](graph)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    part = cut.extract(state)
    assert {n: tuple(t.shape) for n, t in part.items()} == cut.shapes

    same = {n: t.clone() for n, t in state.items()}
    cut.scatter(same, part)
    assert all(torch.equal(same[n], state[n]) for n in state)

    marked = {n: torch.zeros(t.shape) for n, t in state.items()}
    counts = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in state.items()}
    cut.scatter_add(marked, counts, {n: torch.ones(t.shape) for n, t in part.items()})
    for n, tensor in state.items():
        expected = block_mask(cut, n, tuple(tensor.shape))
        assert torch.equal(marked[n].bool(), expected) and torch.equal(counts[n].bool(), expected), n

    assert Cut.from_json(cut.to_json()) == cut and hash(Cut.from_json(cut.to_json())) == hash(cut)


@pytest.mark.parametrize("name", NAMES)
def test_prefix_of_a_quarter_keeps_under_15_percent_and_nothing_is_pinned(name: str) -> None:
    graph = graph_of(name)
    cut = graph.prefix(0.25)
    kept, whole = (sum(torch.Size(c.shapes[n]).numel() for n in graph.parameter_names) for c in (cut, graph.full()))
    assert kept < 0.15 * whole
    assert graph.pinned == ()
