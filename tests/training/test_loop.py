"""A device's SGD against arithmetic written out, and what may and may not change its bits."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.data import ImageSet
from strata.graph import ChannelGraph
from strata.methods import FD, FedAvg, FjORD, HeteroFL, Small, Task
from strata.training import LocalTraining, Update, Workspace, train_device, workspace
from tests.methods.tiny import INPUT, same_bits, samples, tiny_graph, tiny_net, tiny_state, train
from tests.networks import NETWORKS
from tests.workspaces import workspace_of

# --- two weights by hand ----------------------------------------------------------------------------------------------


@cache
def two_layers() -> ChannelGraph:
    """out = V (U x): one input, two hidden units, two outputs."""
    return ChannelGraph(
        nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)), input_shape=(1, 1, 1)
    )


def first_output(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs[:, 0].mean()


def ones(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.ones(images.shape)


BY_HAND = LocalTraining(
    batch_size=1, momentum=0.5, weight_decay=0.0, loss=first_output, transform=ones, preparation=ones
)
U, V = [1.0, 2.0], [3.0, 5.0]  # hidden weights; weights of output 0


def train_two_layers(task: Task, batches: int, settings: LocalTraining = BY_HAND, seed: int = 0) -> Update:
    state = {"1.weight": torch.tensor(U).view(2, 1), "2.weight": torch.tensor([V, [0.0, 0.0]])}
    images, labels = torch.zeros(batches, 1, 1, 1, dtype=torch.uint8), torch.zeros(batches, dtype=torch.int64)
    return train_device(
        workspace_of(two_layers()), task, task.cut.extract(state), ImageSet(images, labels), settings, lr=0.1, seed=seed
    )


def test_momentum_by_hand() -> None:
    (task,) = FedAvg(two_layers()).assign(0, [0])
    update = train_two_layers(task, batches=2)
    # loss = u0 v0 + u1 v1, du = v, dv = u.
    # batch 1: loss 13; mu = (3, 5), mv = (1, 2) -> u = (.7, 1.5), v = (2.9, 4.8)
    # batch 2: loss 9.23; mu = .5 (3, 5) + (2.9, 4.8) = (4.4, 7.3), mv = .5 (1, 2) + (.7, 1.5) = (1.2, 2.5)
    assert update.tensors["1.weight"].flatten().tolist() == pytest.approx([0.7 - 0.44, 1.5 - 0.73])
    assert update.tensors["2.weight"][0].tolist() == pytest.approx([2.9 - 0.12, 4.8 - 0.25])
    assert update.tensors["2.weight"][1].tolist() == [0.0, 0.0]
    assert update.loss == pytest.approx((13 + 0.7 * 2.9 + 1.5 * 4.8) / 2)


def test_weight_decay_and_proximal_term_by_hand() -> None:
    (task,) = FedAvg(two_layers()).assign(0, [0])
    decayed = train_two_layers(task, 1, LocalTraining(**{**vars(BY_HAND), "weight_decay": 0.1}))
    assert decayed.tensors["1.weight"].flatten().tolist() == pytest.approx([1 - 0.1 * 3.1, 2 - 0.1 * 5.2])
    # proximal, no momentum. Batch 1 starts at the received weights, so only batch 2 feels it: there u = (.7, 1.5) is
    # (-.3, -.5) away and v = (2.9, 4.8), so du = v + .2 (-.3, -.5)
    settings = LocalTraining(**{**vars(BY_HAND), "momentum": 0.0, "proximal": 0.2})
    near = train_two_layers(task, 2, settings)
    assert near.tensors["1.weight"].flatten().tolist() == pytest.approx([0.7 - 0.1 * 2.84, 1.5 - 0.1 * 4.7])
    assert near.loss == pytest.approx((13 + 9.23) / 2), "the loss reported is that of the data"


def test_micro_batches_add_up_to_the_batch() -> None:
    """No batch norm here, so accumulating over 3 + 3 + 1 samples is the batch of 7."""
    whole, parts = (LocalTraining(**{**vars(BY_HAND), "batch_size": 7, "micro_batch": m}) for m in (None, 3))
    (task,) = FedAvg(two_layers()).assign(0, [0])
    a, b = (train_two_layers(task, 7, settings) for settings in (whole, parts))
    for name in a.tensors:
        torch.testing.assert_close(a.tensors[name], b.tensors[name])
    assert a.loss == pytest.approx(b.loss) == pytest.approx(13)


def test_fjord_keeps_momentum_across_mini_batches() -> None:
    """Levels 1 and 2 of 2 hidden units. The second unit gets no gradient at level 1, and its momentum carries on."""
    (task,) = FjORD(two_layers(), (0.5, 1.0)).assign(0, [1])
    assert [cut.shapes["1.weight"] for cut in task.phases[0].levels] == [(1, 1), (2, 1)]
    batches, seen = 6, set()
    for seed in range(4):
        draws = generator(seed, "fjord level", 0, 1)
        levels = [int(torch.randint(2, (), generator=draws)) for _ in range(batches)]
        seen.add(tuple(levels))
        u, v, mu, mv, total = list(U), list(V), [0.0, 0.0], [0.0, 0.0], 0.0
        for level in levels:
            inside = [True, level == 1]
            total += sum(u[i] * v[i] for i in (0, 1) if inside[i])
            gradients = [(v[i], u[i]) if inside[i] else (0.0, 0.0) for i in (0, 1)]
            for i, (du, dv) in enumerate(gradients):
                mu[i], mv[i] = 0.5 * mu[i] + du, 0.5 * mv[i] + dv
                u[i], v[i] = u[i] - 0.1 * mu[i], v[i] - 0.1 * mv[i]
        update = train_two_layers(task, batches, seed=seed)
        assert update.tensors["1.weight"].flatten().tolist() == pytest.approx(u, abs=1e-5)
        assert update.tensors["2.weight"][0].tolist() == pytest.approx(v, abs=1e-5)
        assert update.loss == pytest.approx(total / batches, abs=1e-5)
    assert len(seen) == 4 and any(len(set(levels)) == 2 for levels in seen)


def test_fjord_on_one_level_is_heterofl() -> None:
    state = tiny_state()
    fjord, heterofl = FjORD(tiny_graph(), (0.5,)), HeteroFL(tiny_graph(), (0.5,))
    a, b = (train(method, method.assign(0, [0])[0], state) for method in (fjord, heterofl))
    assert same_bits(a.tensors, b.tensors)


# --- a network --------------------------------------------------------------------------------------------------------


def test_equals_plain_training_of_the_plain_model() -> None:
    """Three epochs, short last batch, against a loop over the nn.Module itself (other memory layout: not same bits)."""
    images, labels = samples(0, count=20)
    settings = LocalTraining(batch_size=8, epochs=3, weight_decay=1e-3)
    (task,) = FedAvg(tiny_graph()).assign(4, [2])
    update = train_device(
        workspace_of(tiny_graph()), task, tiny_state(), ImageSet(images, labels), settings, lr=0.05, seed=9
    )

    net = tiny_net().train()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    order = generator(9, "sample order", 4, 2)
    sizes, total = [], 0.0
    for _ in range(3):
        for index in torch.randperm(20, generator=order).split(8):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images[index].float() / 255), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
            sizes.append(len(index))
    assert sizes == [8, 8, 4] * 3
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(update.tensors[name], parameter.detach(), rtol=1e-3, atol=1e-4)
    assert update.loss == pytest.approx(total / 60, rel=1e-4)


def test_every_sample_once_per_epoch_in_an_order_of_its_own() -> None:
    seen: list[int] = []

    def remember(images: Tensor, generator: torch.Generator) -> Tensor:
        seen.extend(images[:, 0, 0, 0].tolist())
        return torch.zeros(len(images), *INPUT)

    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, *INPUT)
    labels = torch.zeros(10, dtype=torch.int64)
    orders = []
    for round, device in ((0, 0), (0, 1), (1, 0), (0, 0)):
        settings = LocalTraining(batch_size=6, epochs=2, transform=remember, preparation=ones)
        seen.clear()
        task = Task(round, device, tiny_graph().full())
        train_device(workspace_of(tiny_graph()), task, tiny_state(), ImageSet(images, labels), settings, 0.1, seed=0)
        assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))
        orders.append(tuple(seen[:20]))  # what follows is a batch for measuring memory
    assert orders[0] == orders[3] and len(set(orders)) == 3


def adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr)


def test_loss_and_optimizer_of_ones_own() -> None:
    (task,) = FedAvg(two_layers()).assign(0, [0])
    update = train_two_layers(task, 1, LocalTraining(**{**vars(BY_HAND), "optimizer": adam}))
    # Adam's first step is lr * sign(gradient)
    assert update.tensors["1.weight"].flatten().tolist() == pytest.approx([0.9, 1.9], abs=1e-4)


def test_settings_are_values() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    a, b = (LocalTraining(mean=[0.5], std=[0.2], loss=loss) for _ in range(2))  # type: ignore[arg-type]
    assert a == b and hash(a) == hash(b) and a.mean == (0.5,)


def test_dropout_is_seeded_by_the_task_and_leaves_the_global_generator_alone() -> None:
    net, shape = NETWORKS["vgg"]()  # dropout, and a `view` that does not run with channels last
    graph = ChannelGraph(net, shape)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    images, labels = samples(0, count=6, shape=shape)

    def update(round: int) -> Update:
        task = Task(round, 0, graph.full())
        return train_device(workspace_of(graph), task, state, ImageSet(images, labels), LocalTraining(), 0.1, seed=0)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = update(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_bits(update(0).tensors, first.tensors)
    assert not same_bits(update(1).tensors, first.tensors), "one batch of all samples: only dropout differs"
    assert (
        not workspace_of(graph).submodel(graph.full()).channels_last
        and workspace_of(tiny_graph()).submodel(tiny_graph().full()).channels_last
    )


def test_nan_is_not_hidden() -> None:
    state = tiny_state()
    state["conv1.weight"][0, 0, 0, 0] = float("nan")
    update = train(FedAvg(tiny_graph()), FedAvg(tiny_graph()).assign(0, [0])[0], state)
    assert math.isnan(update.loss) and update.tensors["conv1.weight"].isnan().any()


def test_tasks_of_one_structure_share_a_module() -> None:
    method = FD(tiny_graph(), (0.5,), seed=0)
    cuts = [method.cut_for(round, 0) for round in range(5)]
    assert len(set(cuts)) == 5
    assert len({id(workspace_of(tiny_graph()).submodel(cut)) for cut in [*cuts, tiny_graph().prefix(0.5)]}) == 1
    assert workspace_of(tiny_graph()).submodel(tiny_graph().prefix(0.25)) is not workspace_of(tiny_graph()).submodel(
        tiny_graph().prefix(0.5)
    )
    assert workspace_of(tiny_graph()).submodel(tiny_graph().slt(1, 2, 0.5)) is not workspace_of(tiny_graph()).submodel(
        tiny_graph().slt(0, 2, 0.5)
    ), "other frozen layers"


def test_warm_modules_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "SUBMODEL_BYTES_KEPT", 0)
    own = Workspace(tiny_graph())
    full, half = own.submodel(tiny_graph().full()), own.submodel(tiny_graph().prefix(0.5))
    assert own.submodel(tiny_graph().full()) is full and own.submodel(tiny_graph().prefix(0.5)) is half
    own.submodel(tiny_graph().prefix(0.25))
    assert own.submodel(tiny_graph().prefix(0.5)) is half and own.submodel(tiny_graph().full()) is not full


def test_update_does_not_alias_the_warm_module() -> None:
    method = Small(tiny_graph(), (0.5,))
    task = method.assign(0, [0])[0]
    first = train(method, task, tiny_state())
    copy = {name: tensor.clone() for name, tensor in first.tensors.items()}
    train(method, method.assign(1, [1])[0], tiny_state(seed=3))
    assert same_bits(first.tensors, copy)
    assert all(tensor.is_contiguous() for tensor in first.tensors.values())


def test_bad_input() -> None:
    (task,) = FedAvg(tiny_graph()).assign(0, [0])
    images, labels = samples(0, count=0)
    with pytest.raises(BadInput, match="device 0 has no samples"):
        train_device(
            workspace_of(tiny_graph()), task, tiny_state(), ImageSet(images, labels), LocalTraining(), 0.1, seed=0
        )
    for wrong in (
        {"batch_size": 0}, {"epochs": 0}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0},
        {"proximal": float("nan")}, {"transform": ones}, {"micro_batch": 33}, {"micro_batch": 0},
    ):  # fmt: skip
        with pytest.raises(BadInput):
            LocalTraining(**wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="no augmentation 'mixup'; choose one of none, cifar"):
        LocalTraining(augmentation="mixup")
    LocalTraining(augmentation="of the transform", transform=ones, preparation=ones)


@pytest.mark.parametrize("device", ["cuda", "mps", "meta", "toaster"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BadInput, match="give cpu, cuda or cuda:N"):
        LocalTraining(device=device)
