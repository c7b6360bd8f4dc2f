"""What must hold for every method, with a tiny local server."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from strata.graph import ChannelGraph
from strata.methods import FD, SLT, FedAvg, FedRolex, FjORD, HeteroFL, Method, Small
from strata.training import LocalTraining, Update
from tests.methods.tiny import aggregate, hand_plan, run, same_bits, tiny_graph, tiny_state, train
from tests.networks import NETWORKS, graph_of


def methods(graph: ChannelGraph, *constraints: float) -> dict[str, Method]:
    levels = [(0, 0, 1), (0, 0, 0), (0, 0, 1)][: len(constraints)] if len(constraints) > 1 else ()
    steps = [(0, 0, 0.25, 1), (0, 1, 0.5, 3), (1, 2, 0.5, 6)] if min(constraints) < 1 else [(0, 0, 1.0, 6)]
    return {
        "slt": SLT(hand_plan(graph, *steps, levels=levels)),
        "small": Small(graph, constraints),
        "fd": FD(graph, constraints, seed=5),
        "fd shared": FD(graph, constraints, seed=5, variant="shared"),
        "fd pool": FD(graph, constraints, seed=5, variant="pool", pool=3),
        "fedrolex": FedRolex(graph, constraints),
        "heterofl": HeteroFL(graph, constraints),
        "fjord": FjORD(graph, constraints),
    }


@cache
def at_half() -> dict[str, Method]:
    return methods(tiny_graph(), 0.5)


@cache
def mixed() -> dict[str, Method]:
    return methods(tiny_graph(), 0.5, 1.0, 0.25)


NAMES = ("slt", "small", "fd", "fd shared", "fd pool", "fedrolex", "heterofl", "fjord")


def test_no_method_is_left_out() -> None:
    assert NAMES == tuple(at_half())


@pytest.fixture(scope="module")
def fedavg() -> dict[str, Tensor]:
    return run(FedAvg(tiny_graph()), rounds=3)


@pytest.mark.parametrize("name", NAMES)
def test_at_scale_one_every_method_gives_fedavgs_bits(name: str, fedavg: dict[str, Tensor]) -> None:
    assert same_bits(run(methods(tiny_graph(), 1.0)[name], rounds=3), fedavg)
    assert not same_bits(fedavg, tiny_state())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("levels", ["half", "mixed"])
def test_a_device_receives_and_uploads_its_cut_and_nothing_else(name: str, levels: str) -> None:
    method = (at_half() if levels == "half" else mixed())[name]
    state = tiny_state()
    for round in range(0, 6, 2):
        tasks = method.assign(round, range(3))
        updates = []
        for task in tasks:
            received = task.cut.extract(state)
            assert {n: tuple(t.shape) for n, t in received.items()} == task.cut.shapes
            update = train(method, task, state)
            assert tuple(update.tensors) == task.cut.trained, "trained parameters, no frozen ones, no buffers"
            assert all(tuple(tensor.shape) == task.cut.shapes[n] for n, tensor in update.tensors.items())
            assert not any(torch.equal(t, received[n]) for n, t in update.tensors.items()), "and all of it has moved"
            assert (update.round, update.device, update.samples) == (round, task.device, 20)
            assert update.cut_hash == task.cut.hash and math.isfinite(update.loss)
            updates.append(update)
        after = aggregate(state, tasks, updates)
        touched = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in state.items()}
        for task in tasks:
            task.cut.scatter(touched, {n: torch.ones(task.cut.shapes[n], dtype=torch.bool) for n in task.cut.trained})
        for n in state:
            assert torch.equal(after[n][~touched[n]], state[n][~touched[n]]), f"{n} changed outside the cuts"
        state = after


def test_frozen_tensors_never_change_a_bit() -> None:
    method = at_half()["slt"]
    last = method.plan.steps[-1]  # type: ignore[attr-defined]
    state = tiny_state()
    (task,) = method.assign(5, [0])
    assert last.k_frozen >= 1 and len(task.cut.frozen) >= 3
    after = run(method, rounds=6)
    again = aggregate(after, [task], [train(method, task, after)])
    for name in task.cut.frozen:
        assert torch.equal(again[name], after[name])
        assert not torch.equal(after[name], state[name]), "it had been trained before it froze"
    assert all(not torch.equal(again[name], after[name]) for name in task.cut.trained)


def test_the_same_task_gives_the_same_bits_whatever_ran_before() -> None:
    state = tiny_state()
    for name, method in mixed().items():
        task = method.assign(2, [0])[0]
        first = train(method, task, state)
        run(method, rounds=2, devices=(1,))
        torch.manual_seed(99)
        second = train(method, task, state)
        assert same_bits(first.tensors, second.tensors) and first.loss == second.loss, name


def test_mean_over_those_who_trained_a_coordinate_by_hand() -> None:
    """Two hidden units; device 0 holds one of them, device 1 both. Updates are set by hand, not trained."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False))
    graph = ChannelGraph(net, input_shape=(1, 1, 1))
    method = HeteroFL(graph, (0.5, 1.0))
    tasks = method.assign(0, [0, 1, 2])  # levels 0.5, 1, 0.5
    state = {"1.weight": torch.tensor([[10.0], [20.0]]), "2.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    first = {"1.weight": torch.tensor([[1.0]]), "2.weight": torch.tensor([[0.0], [6.0]])}
    whole = {"1.weight": torch.tensor([[4.0], [8.0]]), "2.weight": torch.tensor([[3.0, 5.0], [0.0, 7.0]])}
    third = {"1.weight": torch.tensor([[7.0]]), "2.weight": torch.tensor([[9.0], [3.0]])}
    assert {n: tuple(t.shape) for n, t in first.items()} == tasks[0].cut.shapes
    updates = [Update(0, d, tensors, 1, 0.0, 0, "") for d, tensors in enumerate((first, whole, third))]
    after = aggregate(state, tasks, updates)
    assert after["1.weight"].tolist() == [[4.0], [8.0]]  # (1 + 4 + 7) / 3; 8 from device 1 alone
    assert after["2.weight"].tolist() == [[4.0, 5.0], [3.0, 7.0]]  # (0+3+9)/3, (6+0+3)/3
    untouched = aggregate(state, tasks[:1], updates[:1])
    assert untouched["1.weight"].tolist() == [[1.0], [20.0]]  # the server's 20 stays


@pytest.mark.parametrize(("network", "constraint"), [("resnet20", 0.25), ("densenet", 0.33)])
def test_every_method_trains_the_papers_networks(network: str, constraint: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, _ = NETWORKS[network]()
    graph = graph_of(network)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    settings = LocalTraining(augmentation="cifar")
    for name, method in methods(graph, constraint, 2 * constraint).items():
        task = method.assign(1, [1])[0]
        update = train(method, task, state, settings)
        assert math.isfinite(update.loss) and update.peak_bytes > 0, name
        full = sum(t.numel() for n, t in state.items() if n in graph.parameter_names)
        assert sum(t.numel() for t in update.tensors.values()) < 0.7 * full, name
