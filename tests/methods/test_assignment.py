"""Which cut for whom: hand-computed index sets on a small network."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput, Infeasible
from strata.graph import ChannelGraph
from strata.methods import FD, FedAvg, FedRolex, FjORD, HeteroFL, Levels, Small, create
from tests.methods.tiny import tiny_graph

DEVICES = range(6)

# (output dim of one, input or per-channel dim of the others) that must agree, because the channels are the same
COUPLED = {
    "stem.0.weight": [
        ("stem.1.weight", 0),
        ("conv1.weight", 1),
        ("conv2.weight", 0),
        ("bn2.bias", 0),
        ("down.0.weight", 1),
    ],
    "conv1.weight": [("bn1.weight", 0), ("bn1.running_var", 0), ("conv2.weight", 1)],
    "down.0.weight": [("down.1.running_mean", 0), ("classifier.weight", 1)],
}
WIDTHS = {"stem.0.weight": 8, "conv1.weight": 8, "down.0.weight": 16}


def kept(cut, name, dim=0):
    """Explicit indices; a dim that is kept whole may be written None."""
    indices = cut.kept[name][dim]
    return tuple(range(tiny_graph().state_shapes[name][dim])) if indices is None else tuple(indices)


def assert_coupled(cut):
    for source, others in COUPLED.items():
        for name, dim in others:
            assert kept(cut, name, dim) == kept(cut, source), (source, name, dim)
    assert kept(cut, "stem.0.weight", 1) == (0, 1, 2)  # input channels are never cut
    assert kept(cut, "classifier.weight", 0) == kept(cut, "classifier.bias", 0) == (0, 1, 2)  # nor are classes


def test_device_levels_go_round() -> None:
    method = HeteroFL(tiny_graph(), (0.25, 0.5, 1.0))
    widths = [len(kept(task.cut, "stem.0.weight")) for task in method.assign(0, DEVICES)]
    assert widths == [2, 4, 8, 2, 4, 8]
    assert [(task.round, task.device) for task in method.assign(7, [4, 1])] == [(7, 4), (7, 1)]


@pytest.mark.parametrize("constraints", [(), (0.0,), (2.0,), (0.5, -1.0), (float("nan"),)])
def test_a_constraint_is_a_ratio(constraints) -> None:
    with pytest.raises(BadInput):
        Small(tiny_graph(), constraints)


def test_small_uses_the_lowest_level_for_all_and_evaluates_it() -> None:
    method = Small(tiny_graph(), (0.5, 0.25))
    cuts = {task.cut for round in range(3) for task in method.assign(round, DEVICES)}
    assert cuts == {tiny_graph().prefix(0.25)}
    assert method.evaluation_cut(2) == method.server_cut() == tiny_graph().prefix(0.25)
    assert kept(method.server_cut(), "down.0.weight") == (0, 1, 2, 3)


def test_fedavg_leaves_out_devices_that_cannot_hold_the_model() -> None:
    method = FedAvg(tiny_graph(), (0.5, 1.0))
    assert [task.device for task in method.assign(0, DEVICES)] == [1, 3, 5]
    assert [device for device in DEVICES if method.can_train(device)] == [1, 3, 5]
    assert all(task.cut == tiny_graph().full() for task in method.assign(0, DEVICES))
    with pytest.raises(Infeasible, match="largest constraint is 0.5"):
        FedAvg(tiny_graph(), (0.25, 0.5))


def test_heterofl_prefixes_and_the_server_shrinks_to_the_largest_device() -> None:
    method = HeteroFL(tiny_graph(), (0.25, 0.5))
    small, large = (task.cut for task in method.assign(0, [0, 1]))
    assert kept(small, "conv1.weight") == (0, 1) and kept(large, "conv1.weight") == (0, 1, 2, 3)
    assert method.server_cut() == method.evaluation_cut(0) == large
    assert HeteroFL(tiny_graph(), (0.25, 1.0)).server_cut() == tiny_graph().full()


def test_fjord_switches_among_all_levels_up_to_its_own() -> None:
    method = FjORD(tiny_graph(), (0.5, 0.25, 0.125))
    quarter, half = tiny_graph().prefix(0.25), tiny_graph().prefix(0.5)
    tasks = method.assign(0, [0, 1, 2])
    assert [task.cut for task in tasks] == [half, quarter, tiny_graph().prefix(0.125)]
    assert [task.phases[0].levels for task in tasks] == [
        (tiny_graph().prefix(0.125), quarter, half),
        (tiny_graph().prefix(0.125), quarter),
        (),  # one level: nothing to switch
    ]
    assert method.server_cut() == half


def test_fjord_refuses_levels_that_are_not_nested() -> None:
    """Of a concatenation of 24 + 12 channels the second part keeps floor(36 s) - floor(24 s), which may fall in s."""

    class Concatenated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 12, 1)
            self.classifier = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            return self.classifier(torch.cat([a, self.b(a)], 1).mean([2, 3]))

    graph = ChannelGraph(Concatenated(), tiny_graph().input_shape)
    assert [graph.prefix(scale).shapes["b.weight"][0] for scale in (0.12, 0.125, 0.25)] == [2, 1, 3]
    FjORD(graph, (0.125, 0.25))
    with pytest.raises(BadInput, match="0.12 is not part of 0.125"):
        FjORD(graph, (0.12, 0.125))


def test_fedrolex_window_by_hand() -> None:
    method = FedRolex(tiny_graph(), (0.25,))
    windows = {  # round -> sorted channels: {r^, r^+1} mod 8 and {r^, .., r^+3} mod 16
        0: ((0, 1), (0, 1, 2, 3)),
        5: ((5, 6), (5, 6, 7, 8)),
        7: ((0, 7), (7, 8, 9, 10)),
        14: ((6, 7), (0, 1, 14, 15)),
        16: ((0, 1), (0, 1, 2, 3)),
    }
    for round, (stem, down) in windows.items():
        tasks = method.assign(round, DEVICES)
        assert len({task.cut for task in tasks}) == 1, "all devices alike"
        assert kept(tasks[0].cut, "stem.0.weight") == stem
        assert kept(tasks[0].cut, "down.0.weight") == down
        assert_coupled(tasks[0].cut)
    assert method.evaluation_cut(3) == tiny_graph().full()


def test_fedrolex_covers_every_channel_evenly() -> None:
    method = FedRolex(tiny_graph(), (0.25,))
    for name, width in WIDTHS.items():
        times = Counter(index for round in range(16) for index in kept(method.cut_for(round, 0), name))
        assert times == dict.fromkeys(range(width), 4), name


def test_fedrolex_and_fd_use_each_devices_own_scale() -> None:
    for method in (FedRolex(tiny_graph(), (0.25, 0.5)), FD(tiny_graph(), (0.25, 0.5), seed=3)):
        for task in method.assign(4, DEVICES):
            scale = (0.25, 0.5)[task.device % 2]
            for name, width in WIDTHS.items():
                assert len(kept(task.cut, name)) == width * scale


def test_fd_draws_per_device_and_round_and_couples_channels() -> None:
    method = FD(tiny_graph(), (0.5,), seed=3)
    cuts = [task.cut for round in range(10) for task in method.assign(round, DEVICES)]
    assert len(set(cuts)) > 50, "60 draws, hardly any alike"
    for cut in cuts:
        assert_coupled(cut)
        for name in WIDTHS:
            assert list(kept(cut, name)) == sorted(set(kept(cut, name)))
    times = Counter(index for cut in cuts for index in kept(cut, "stem.0.weight"))
    assert set(times) == set(range(8)) and max(times.values()) < 45, "60 draws of 4 out of 8: about 30 each"
    assert FD(tiny_graph(), (0.5,), seed=3).cut_for(4, 2) == method.cut_for(4, 2), (
        "a function of seed, round and device"
    )
    assert FD(tiny_graph(), (0.5,), seed=4).cut_for(4, 2) != method.cut_for(4, 2)


def test_fd_shared_set_and_fixed_pool() -> None:
    shared = FD(tiny_graph(), (0.5,), seed=3, variant="shared")
    rounds = [{task.cut for task in shared.assign(round, DEVICES)} for round in range(20)]
    assert all(len(cuts) == 1 for cuts in rounds) and len(set().union(*rounds)) > 15

    pool = FD(tiny_graph(), (0.5,), seed=3, variant="pool", pool=4)
    rounds = [{task.cut for task in pool.assign(round, DEVICES)} for round in range(40)]
    assert all(len(cuts) == 1 for cuts in rounds) and len(set().union(*rounds)) == 4

    one = FD(tiny_graph(), (0.5,), seed=3, variant="pool", pool=1)
    assert len({one.cut_for(round, round % 3) for round in range(10)}) == 1
    for wrong in ({"variant": "odd"}, {"variant": "pool"}, {"pool": 3}, {"variant": "pool", "pool": 0}):
        with pytest.raises(BadInput):
            FD(tiny_graph(), (0.5,), **wrong)


def test_create_by_name() -> None:
    assert create("fd", tiny_graph(), constraints=(0.5,), seed=7) == FD(tiny_graph(), (0.5,), seed=7)
    assert create("fd", tiny_graph(), constraints=[0.5], variant="pool", pool=2).pool == 2  # type: ignore[attr-defined]
    assert create("fedavg", tiny_graph()) == FedAvg(tiny_graph())
    with pytest.raises(BadInput, match="choose one of slt, fedavg"):
        create("sgd", tiny_graph())
    with pytest.raises(BadInput, match="needs a plan"):
        create("slt", tiny_graph())
    with pytest.raises(BadInput, match="no option pool"):
        create("small", tiny_graph(), pool=3)


def test_levels_is_enough_for_a_method_of_ones_own() -> None:
    class Last(Levels):
        name = "last"

        def cut_for(self, round, device):
            return self.graph.rolling(self.scale(device), -1)

    (task,) = Last(tiny_graph(), (0.125,)).assign(0, [0])
    assert kept(task.cut, "stem.0.weight") == (7,)
