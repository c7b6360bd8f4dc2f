"""Fixed statistics of batch norms in a step: exact in parts, taken from the buffers, and left alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.data import ImageSet
from strata.execution.norm_statistics import fixed_norms
from strata.graph import ChannelGraph, Cut
from strata.methods import Phase, Task
from strata.training import LocalTraining, evaluate, plain_state, reestimated
from strata.training.cohorts import cohorts
from strata.training.phases import settings_of
from strata.training.trainer import Trainer
from tests.methods.tiny import CLASSES, INPUT, State, samples, tiny_graph, tiny_net, tiny_state
from tests.workspaces import workspace_of

BATCH = LocalTraining(batch_size=16, kernels=False)
FIXED = replace(BATCH, norm_statistics="fixed")
FROZEN = replace(BATCH, norm_statistics="frozen")
MEANS = ("stem.1.running_mean", "bn1.running_mean", "bn2.running_mean", "down.1.running_mean")


@cache
def double() -> ChannelGraph:
    return ChannelGraph(tiny_net().double(), INPUT)


def statistics(state: State) -> State:
    """With statistics that no batch of ours has."""
    generator = torch.Generator().manual_seed(4)
    for name in state:
        if name.endswith(("running_mean", "running_var")):
            state[name] = torch.rand(state[name].shape, generator=generator, dtype=state[name].dtype) + 0.3
    return state


def after_steps(graph: ChannelGraph, cut: Cut, settings: LocalTraining) -> State:
    """Two steps on the same batches."""
    dtype = graph.state_dtypes["conv1.weight"]
    small = workspace_of(graph).submodel(cut)
    small.load(cut.extract({k: v.to(graph.state_dtypes[k]) for k, v in statistics(tiny_state()).items()}))
    trainer = Trainer(workspace_of(graph), Phase(cut), settings, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(16, *INPUT, generator=generator, dtype=dtype)
        trainer.step((x,), torch.randint(CLASSES, (16,), generator=generator))
    return {name: tensor.detach().clone() for name, tensor in small.state.items()}


def far(one: State, other: State) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())


@pytest.mark.parametrize("recomputed", [None, 2])
def test_micro_batches_are_exact_under_fixed_statistics(recomputed: int | None) -> None:
    for graph, tolerance in ((double(), 1e-12), (tiny_graph(), 3e-6)):
        for cut in (graph.full(), graph.prefix(0.5), graph.slt(1, 2, 0.5)):
            whole = after_steps(graph, cut, FIXED)
            part = replace(FIXED, micro_batch=4, activation_checkpointing=recomputed)
            assert far(whole, after_steps(graph, cut, part)) < tolerance
            assert far(whole, after_steps(graph, cut, replace(part, norm_statistics="batch"))) > 1e-3


def test_a_step_is_the_plain_network_with_its_norms_in_evaluation_mode() -> None:
    graph, net = double(), tiny_net().double()
    net.load_state_dict({k: v.to(graph.state_dtypes[k]) for k, v in statistics(tiny_state()).items()})
    for part in net.modules():
        part.train(not isinstance(part, nn.BatchNorm2d))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(16, *INPUT, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (16,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    found = after_steps(graph, graph.full(), FIXED)
    for name, tensor in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-13)


def test_which_norms_are_fixed() -> None:
    graph = tiny_graph()
    assert tuple(norm.mean for norm in graph.batch_norms) == MEANS
    assert graph.batch_norms[1].parameters == ("bn1.weight", "bn1.bias")
    assert fixed_norms(graph, graph.full(), BATCH) == frozenset()
    assert fixed_norms(graph, graph.full(), FIXED) == set(MEANS)
    assert fixed_norms(graph, graph.full(), FROZEN) == frozenset()
    assert fixed_norms(graph, graph.slt(2, 3, 0.5), FROZEN) == set(MEANS[:2])
    head = graph.full().with_frozen(frozenset({"down.1.weight", "down.1.bias"}))
    assert fixed_norms(graph, head, FROZEN) == set(MEANS[3:]), "wherever the frozen layer is"


def test_a_norm_without_parameters_goes_with_what_it_norms() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4, affine=False)
            self.classifier = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(torch.relu(self.norm(torch.relu(self.conv(x)))).mean((2, 3)))

    graph = ChannelGraph(Bare(), INPUT)
    (norm,) = graph.batch_norms
    assert set(norm.parameters) == {"conv.weight", "conv.bias"}
    assert fixed_norms(graph, graph.slt(1, 1, 1.0), FROZEN) == {"norm.running_mean"}


def test_statistics_of_frozen_layers_are_left_alone_and_those_of_others_are_not() -> None:
    graph = tiny_graph()
    cut = graph.slt(2, 3, 0.5)
    given, after = cut.extract(statistics(tiny_state())), after_steps(graph, cut, FROZEN)
    for mean in MEANS:
        for name in (mean, mean.replace("mean", "var")):
            assert torch.equal(given[name], after[name]) == (mean in MEANS[:2])


def test_rounds_before_the_fixed_ones_are_as_ever() -> None:
    later = replace(FIXED, fixed_after=3)
    assert later.in_round(2) == replace(later, norm_statistics="batch") and later.in_round(3) is later
    phase = Phase(tiny_graph().full(), execution=replace(BATCH.alone, micro_batch=4))
    assert settings_of(phase, later, 3).norm_statistics == "fixed", "a method's own execution does not change it"
    tasks = [[Task(round, device, tiny_graph().prefix(0.25)) for device in range(2)] for round in (2, 3)]
    together = [cohorts(workspace_of(tiny_graph()), some, [8, 8], later) for some in tasks]
    assert together == [[[0, 1]], [[0], [1]]]


def test_evaluation_uses_fixed_statistics_and_measures_the_others_behind_them() -> None:
    graph = tiny_graph()
    workspace, full, state = workspace_of(graph), graph.full(), statistics(tiny_state())
    calibration, test = ImageSet(*samples(1, 300)), ImageSet(*samples(2, 60))
    settings = replace(BATCH, mean=(0.3,) * 3, std=(0.2,) * 3)
    made = reestimated(workspace, full, state, calibration, settings, MEANS[:2])
    for name in (*MEANS, *(mean.replace("mean", "var") for mean in MEANS)):
        assert torch.equal(made[name], state[name]) == (name.rpartition(".")[0] in ("stem.1", "bn1"))
    images = (calibration.images[:256].float() / 255 - 0.3) / 0.2
    net = tiny_net()
    net.load_state_dict(state)
    net.eval()
    with torch.no_grad():
        features = net.conv2(torch.relu(net.bn1(net.conv1(net.stem(images)))))
    one = reestimated(workspace, full, state, calibration.subset(torch.arange(256)), settings, MEANS[:2])
    torch.testing.assert_close(one["bn2.running_mean"], features.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    plain = plain_state(full, state, reestimated(workspace, full, state, calibration, settings, MEANS))
    assert all(torch.equal(plain[name], state[name]) for name in state)
    net.load_state_dict(plain)
    outputs = net((test.images.float() / 255 - 0.3) / 0.2)
    right = int((outputs.argmax(1) == test.labels).sum()) / 60
    for bn in ("re-estimated", "batch"):
        found = evaluate(workspace, full, state, test, settings, bn, calibration, MEANS)
        assert found.accuracy == right
        assert found.loss == pytest.approx(functional.cross_entropy(outputs, test.labels).item(), rel=1e-5)
