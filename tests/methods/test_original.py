"""Rivals as their authors train, against the same written out in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import strata
from strata.core.errors import BadInput
from strata.data import FederatedData, ImageSet, Regression, Samples
from strata.data.objectives import MaskedClassification
from strata.execution import Execution, memory
from strata.federation.aggregation import ServerOptimizer
from strata.federation.jobs import TrainJob
from strata.fleet.server.engine import _only_phase
from strata.graph import ChannelGraph, Cut
from strata.methods import FD, SLT, FedRolex, FjORD, HeteroFL, Method, Phase, Task
from strata.methods.aggregate import ClassRows, MeanOverAll
from strata.methods.choice import method_named
from strata.runs.session import flops_of_tasks
from strata.training import LocalTraining, train_device
from tests.federation.fakes import RowCut
from tests.methods.tiny import hand_plan, tiny_graph, tiny_net, tiny_state
from tests.workspaces import workspace_of

SGD = LocalTraining(4, momentum=0.9, weight_decay=0.01)


class Plain(nn.Module):
    """No norm: here a scaler matters."""

    def __init__(self, width: int = 8, scaler: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.classifier = nn.Linear(width, 3)
        self.scaler = scaler

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            if self.training and self.scaler != 1:
                x = x / self.scaler
            x = torch.relu(x)
        return self.classifier(x.mean((2, 3)))


@cache
def plain() -> tuple[Plain, ChannelGraph]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Plain()
    return network, ChannelGraph(network, (3, 8, 8))


def images(count: int, classes: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % classes)


def plain_torch(module: nn.Module, own: ImageSet, epochs: int, lr: float, masked: tuple[int, ...] = ()) -> None:
    """All of a device's samples as one batch, so their order does not matter."""
    optimizer = torch.optim.SGD(module.parameters(), lr, 0.9, weight_decay=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        outputs = module(own.images / 255)
        outputs = torch.stack([0 * c if n in masked else c for n, c in enumerate(outputs.unbind(1))], 1)
        functional.cross_entropy(outputs, own.targets).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1)
        optimizer.step()


@pytest.mark.parametrize("method", [HeteroFL, FedRolex])
def test_a_device_trains_as_heterofls_and_fedrolexs_authors_have_it(method: type[Method]) -> None:
    whole, graph = plain()
    state = {name: 5 * tensor for name, tensor in whole.state_dict().items()}  # gradients large enough to be clipped
    task = method(graph, constraints=(0.5, 1.0), variant="original").assign(0, [0])[0]  # type: ignore[call-arg]
    own = images(6, classes=2)  # it does not hold class 2
    received = task.cut.extract(state)
    settings = replace(SGD, batch_size=6, epochs=3)
    update = train_device(workspace_of(graph), task, received, own, settings, lr=0.05, seed=0)
    reference = Plain(4, scaler=0.5)
    reference.load_state_dict(received)
    plain_torch(reference, own, epochs=3, lr=0.05, masked=(2,))
    for name, value in reference.state_dict().items():
        got = update.tensors[name]
        if name.startswith("classifier"):
            assert torch.equal(got[2], received[name][2]), "a class that it does not hold: as it came"
            got, value = got[:2], value[:2]
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(got, received[name][: len(got)], atol=1e-4)


def test_masked_classes_by_hand() -> None:
    outputs = torch.tensor([[math.log(2), math.log(3), 7.0]], requires_grad=True)
    objective = MaskedClassification().of_device(torch.tensor([1, 0, 1]), 3)
    assert objective == MaskedClassification((2,)) and objective.unheld == (2,)
    loss = objective.mean_loss(outputs, torch.tensor([1]))
    assert loss.item() == pytest.approx(-math.log(3 / (2 + 3 + 1)))  # the masked score is 0: e^0 = 1
    loss.backward()
    assert outputs.grad is not None and outputs.grad.tolist()[0] == pytest.approx([2 / 6, 3 / 6 - 1, 0.0])
    whole = MaskedClassification().of_device(torch.tensor([0, 1, 2]), 3)
    assert whole.loss(outputs, torch.tensor([1])).item() > 3, "nothing is masked where all classes are held"


def test_rows_of_a_class_are_averaged_over_those_who_hold_it() -> None:
    state = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([1.0, 2.0, 3.0])}
    other = {"w": torch.tensor([[3.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([5.0, 2.0, 3.0])}
    third = {"w": torch.tensor([[7.0, 8.0], [9.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([1.0, 4.0, 3.0])}
    whole = Cut("", (("w", (None, None)), ("b", (None,))), ((3, 2), (3,)), frozenset(state), frozenset())
    mean = ClassRows(state, ("w", "b"))
    for update in (other, third):
        mean.add(whole, update)
    after, _ = ServerOptimizer().apply(state, {}, mean)
    # class 0: both changed w; class 1: the third only; class 2: nobody
    assert after["w"].tolist() == [[5.0, 5.0], [9.0, 4.0], [5.0, 6.0]] and after["b"].tolist() == [5.0, 4.0, 3.0]
    assert mean.updates == 2


def test_the_mean_over_all_by_hand() -> None:
    state = {"a": torch.tensor([10.0, 20.0, 30.0]), "b": torch.tensor([1.0])}
    mean = MeanOverAll(state)
    mean.add(RowCut.of(state, {"a": (0, 1)}), {"a": torch.tensor([4.0, 8.0])})
    mean.add(RowCut.of(state, {"a": (1,)}), {"a": torch.tensor([12.0])})
    mean.add(RowCut.of(state, {}), {})  # it has all of this frozen
    after, _ = ServerOptimizer().apply(state, {}, mean)
    # (4 + 10 + 10) / 3 = 8, (8 + 12 + 20) / 3 = 40 / 3; what nobody trained stays
    assert after["a"].tolist() == pytest.approx([8.0, 40 / 3, 30.0]) and after["b"] is state["b"]


def test_slts_averaging_both_ways() -> None:
    plan = hand_plan(tiny_graph(), (0, 0, 0.25, 1), (1, 2, 0.5, 9), levels=[(0, 1), (0, 0)])
    state = tiny_state()
    assert SLT(plan).aggregation(0, state) is None and not SLT(plan).aggregates
    assert isinstance(SLT(plan, averaging="all").aggregation(0, state), MeanOverAll)
    with pytest.raises(BadInput, match="the averaging of slt is one of trained, all, not 'some'"):
        SLT(plan, averaging="some")


def test_fjords_largest_level_teaches_the_one_that_is_drawn() -> None:
    """One mini-batch of the level 0.5: gradients by the labels at 1, and by its outputs at 0.5."""
    whole, graph = plain()
    method = FjORD(graph, constraints=(0.5, 1.0), variant="original")
    task = method.assign(0, [1])[0]
    assert task.phases == (Phase(graph.full(), levels=(graph.prefix(0.5), graph.full()), distilled=True),)
    assert FjORD(graph, constraints=(0.5, 1.0), variant="original").assign(0, [0])[0].phases == (
        Phase(graph.prefix(0.5)),
    )
    own = images(6)
    state = whole.state_dict()
    draws = [
        int(torch.randint(2, (), generator=strata.core.seeds.generator(seed, "fjord level", 0, 1))) for seed in range(8)
    ]
    settings = LocalTraining(6, momentum=0.0, weight_decay=0.0)
    for seed in (draws.index(0), draws.index(1)):
        update = train_device(workspace_of(graph), task, task.cut.extract(state), own, settings, lr=0.1, seed=seed)
        big, small = Plain(), Plain(4)
        big.load_state_dict(state)
        small.load_state_dict(graph.prefix(0.5).extract(state))
        outputs = big(own.images / 255)
        functional.cross_entropy(outputs, own.targets).backward()
        gradients = {name: p.grad.clone() for name, p in big.named_parameters() if p.grad is not None}
        if draws[seed] == 0:  # else it would teach itself, and learn nothing
            functional.cross_entropy(small(own.images / 255), outputs.detach().softmax(1)).backward()
            taught = {name: torch.zeros_like(value) for name, value in gradients.items()}
            graph.prefix(0.5).scatter(
                taught, {name: p.grad for name, p in small.named_parameters() if p.grad is not None}
            )
            gradients = {name: value + taught[name] for name, value in gradients.items()}
        for name, gradient in gradients.items():
            torch.testing.assert_close(update.tensors[name], state[name] - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    flops = flops_of_tasks(method)
    alone = [flops(Task(0, 0, cut)) for cut in task.phases[0].levels]
    assert flops(task) == alone[1] + alone[0] // 2


def test_clipping_is_a_setting_of_a_step() -> None:
    graph, state = tiny_graph(), {name: tensor.clone() for name, tensor in tiny_net().state_dict().items()}
    task, own = Task(0, 0, graph.full()), images(6)
    settings = LocalTraining(6, momentum=0.0, weight_decay=0.0)
    workspace = workspace_of(graph)
    free, clipped, wide = (
        train_device(workspace, task, task.cut.extract(state), own, replace(settings, clip=clip), 0.1, 0).tensors
        for clip in (None, 0.01, 1e6)
    )
    steps = {name: free[name] - state[name] for name in free}
    norm = math.sqrt(sum(float(step.square().sum()) for step in steps.values())) / 0.1
    assert norm > 0.1 and all(torch.equal(free[name], wide[name]) for name in free)
    for name, step in steps.items():
        torch.testing.assert_close(clipped[name] - state[name], step * 0.01 / norm, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "fjord"])
def test_whole_runs(name: str, tmp_path: Path) -> None:
    graph = tiny_graph()
    kind = {"heterofl": HeteroFL, "fedrolex": FedRolex, "fjord": FjORD}[name]
    data = FederatedData(images(48), images(12), "some", 3)
    results = []
    for variant in (None, "original"):
        method = kind(graph, constraints=(0.25, 1.0), variant=variant)  # type: ignore[call-arg]
        results.append(
            strata.run(tiny_net(), data, method, rounds=2, devices=8, per_round=4, partition="shards:1", workers=0,
                       out=tmp_path / str(variant), progress=False, training=LocalTraining(4)).state_dict()
        )  # fmt: skip
    assert any(not torch.equal(results[0][key], results[1][key]) for key in results[0])
    with pytest.raises(BadInput, match=f"the variant of {name} must be one of original, not 'mine'"):
        kind(graph, constraints=(0.5,), variant="mine")  # type: ignore[call-arg]
    job = TrainJob(method.assign(0, [1])[0], torch.arange(3).numpy(), 0.1, 0)
    with pytest.raises(BadInput, match="simulate this method instead"):
        _only_phase(job)
    parts = [Samples(images(8).inputs, torch.rand(8, 3)) for _ in range(2)]
    numbers = FederatedData(parts[0], parts[1], "pumps", classes=3, objective=Regression())
    with pytest.raises(BadInput, match=f"the variant original of {name} is for classes"):
        strata.run(tiny_net(), numbers, method, rounds=1, devices=2, per_round=1, out=tmp_path / "no", workers=0)


def test_fd_has_variants_of_its_own() -> None:
    with pytest.raises(BadInput, match="the variant of fd must be one of device, shared, pool, not 'original'"):
        FD(tiny_graph(), constraints=(0.5,), variant="original")


def test_what_every_device_would_refuse_is_refused_before_the_run(tmp_path: Path) -> None:
    data = FederatedData(images(48), images(12), "some", 3)

    def refused(method: Method, says: str, training: LocalTraining) -> None:
        with pytest.raises(BadInput, match=says):
            strata.run(tiny_net(), data, method, rounds=1, devices=4, per_round=2, workers=0, out=tmp_path / "no",
                       training=training, progress=False)  # fmt: skip
        assert not (tmp_path / "no").exists()

    graph, released = tiny_graph(), LocalTraining(4, release_gradients=True)
    original = HeteroFL(graph, constraints=(0.5, 1.0), variant="original")
    refused(original, "clipping goes by all gradients together", released)
    refused(FjORD(graph, constraints=(0.5, 1.0)), "where mini-batches train levels of one network", released)
    own = LocalTraining(4, loss=functional.cross_entropy)
    refused(original, "leave out the variant, or the loss", own)


def test_lean_execution_of_an_authors_variant_keeps_gradients_for_clipping() -> None:
    graph = tiny_graph()
    size = memory(graph, graph.full(), Execution(16, 4, activation_checkpointing="auto")).total
    made = [
        method_named("heterofl", graph, budgets=[size], execution=Execution(16), lean=True, **options)
        for options in ({}, {"variant": "original"})
    ]
    plainly, clipped = (one.assign(0, [0])[0].phases[0].execution for one in made)
    assert plainly is not None and clipped is not None and not clipped.release_gradients


def test_statistics_come_from_as_many_images_as_asked(tmp_path: Path) -> None:
    """`bn_images`: of all 48, they are those of one pass over the training data in batches of 256."""
    data, found = FederatedData(images(48), images(12), "some", 3), []
    for number in (6, 48, 500):
        result = strata.run(
            tiny_net(), data, FedRolex(tiny_graph(), constraints=(1.0,)), rounds=1, devices=4, per_round=2, workers=0,
            out=tmp_path / str(number), progress=False, bn_images=number, training=LocalTraining(4),
        )  # fmt: skip
        found.append(result.state_dict())
    buffers = [name for name in found[0] if name.endswith("running_mean")]
    assert any(not torch.equal(found[0][name], found[1][name]) for name in buffers)
    first = next(iter(buffers))
    assert torch.allclose(found[1][first], found[2][first], atol=1e-6)
    net = tiny_net()
    net.load_state_dict(found[1])
    before: list[Tensor] = []
    norm = net.get_submodule(first.removesuffix(".running_mean"))
    norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
    with torch.no_grad():
        net.eval()(next(iter(images(48).inputs.values())).float() / 255)
    assert torch.allclose(before[0].mean((0, 2, 3)), found[1][first], atol=1e-4)
