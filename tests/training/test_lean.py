"""Ways of keeping less: what they do to an update."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.data import AUGMENTATIONS
from strata.data.augmentation import augment
from strata.execution import Execution
from strata.execution.mapped import MappedWeights, is_mapped
from strata.execution.optimizers import LeanSGD, Summed
from strata.graph import ChannelGraph
from strata.graph.inputs import Input, InputSpec
from strata.methods import SLT, FedAvg, FjORD, Phase, Small
from strata.training import LocalTraining
from strata.training.cohorts import cohorts
from strata.training.trainer import Trainer
from tests.methods.tiny import hand_plan, same_bits, samples, tiny_graph, tiny_state, train
from tests.workspaces import workspace_of

PLAIN = LocalTraining(batch_size=8)


# --- samples that wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_samples_wait_as_bytes_and_become_what_the_batch_would_have_been(name: str) -> None:
    images, _ = samples(0, count=7)
    settings = LocalTraining(7, 3, augmentation=name, mean=(0.4,) * 3, std=(0.2,) * 3)
    waiting = settings.waiting((images,), torch.Generator().manual_seed(5))
    assert waiting.stored[0].dtype == torch.uint8
    whole = augment(images, name, torch.Generator().manual_seed(5), settings.mean, settings.std)
    for size in (1, 3, 7):
        assert torch.equal(torch.cat([part for (part,) in waiting.split(size)]), whole)


def test_a_transform_of_the_user_gets_the_whole_batch() -> None:
    images, _ = samples(0, count=4)
    settings = LocalTraining(4, 2, transform=shuffled, preparation=shuffled)
    waiting = settings.waiting((images,), torch.Generator().manual_seed(5))
    whole = shuffled(images, torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([part for (part,) in waiting.split(2)]), whole)


def shuffled(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return images.float()[torch.randperm(len(images), generator=generator)]


# --- gradients that go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{}, {"proximal": 0.1}, {"activation_checkpointing": "auto"}, {"momentum_dtype": "bfloat16"}], ids=str
)
def test_released_gradients_give_the_same_bits(more: dict[str, object]) -> None:
    method = FedAvg(tiny_graph())
    (task,) = method.assign(0, [0])
    plain = replace(PLAIN, **more)  # type: ignore[arg-type]
    one, other = (train(method, task, tiny_state(), replace(plain, release_gradients=r)) for r in (False, True))
    assert one.loss == other.loss and same_bits(one.tensors, other.tensors)
    assert other.peak_bytes <= one.peak_bytes


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(x * self.twice).tanh() * self.twice)


def own_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def test_a_shared_parameter_takes_one_step_for_both_its_uses() -> None:
    torch.manual_seed(0)
    model = Shared()
    graph = ChannelGraph(model, (6,))
    cut, workspace = graph.full(), workspace_of(graph)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    found = []
    for release in (False, True):
        small = workspace.submodel(cut)
        small.load(cut.extract(model.state_dict()))
        trainer = Trainer(workspace, Phase(cut), replace(PLAIN, release_gradients=release), lr=0.1)
        losses = [trainer.step((x,), y) for _ in range(3)]
        found.append((losses, {name: tensor.detach().clone() for name, tensor in small.state.items()}))
        assert not release or all(p.grad is None for p in small.parameters.values())
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])
    # nothing is left behind: the next who trains this submodel has gradients of its own
    loss = small.module(x).sum()
    loss.backward()
    assert all(p.grad is not None for p in small.parameters.values())


class Doubles(nn.Module):
    """In float64, where rounding hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@pytest.mark.parametrize("more", [{}, {"proximal": 0.1}, {"weight_decay": 0.02, "momentum": 0.5}], ids=str)
@pytest.mark.parametrize("scaler", [None, 0.5])
def test_gradients_of_parts_go_into_the_momentum_and_the_step_is_the_same(
    more: dict[str, object], scaler: float | None
) -> None:
    torch.manual_seed(0)
    model = Doubles()
    graph = ChannelGraph(model, InputSpec((Input("x", (6,), torch.float64),)))
    cut, workspace = graph.full(), workspace_of(graph)
    x, y = torch.randn(14, 6, dtype=torch.float64), torch.randint(0, 3, (14,))
    plain = replace(LocalTraining(5, weight_decay=0.01), **more)  # type: ignore[arg-type]
    found = []
    for settings in (plain, replace(plain, micro_batch=2, release_gradients=True)):
        small = workspace.submodel(cut)
        small.load(cut.extract(model.state_dict()))
        trainer = Trainer(workspace, Phase(cut, scaler=scaler), settings, lr=0.1)
        batches = zip(x.split(5), y.split(5), strict=True)  # 5, 5 and 4: in parts of 2, 2, 1 and 2, 2
        losses = [trainer.step((own,), labels) for own, labels in batches]
        found.append((losses, dict(zip(trainer.names, trainer.values(), strict=True))))
        assert settings is plain or all(p.grad is None for p in small.parameters.values())
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-12, atol=1e-14)
        assert not torch.equal(value, model.state_dict()[name])


def test_parts_summed_in_the_momentum_by_hand() -> None:
    """w = 1, lr 1/4, momentum 1/2, decay 1/8; a batch of parts with gradients 2 and 3, then one with 1 alone."""
    weight = nn.Parameter(torch.ones(1))
    summed = Summed([weight], 0.25, 0.5, 0.125, [1.0])
    for parts, velocity, after in (((2.0, 3.0), 5.125, 1 - 1.28125), ((1.0,), 2.5625 + 1 - 0.28125 / 8, None)):
        with summed.releasing():
            for gradient in parts:
                (weight * gradient).sum().backward()
                assert weight.grad is None
        assert summed.state[weight]["momentum_buffer"].item() == velocity
        assert weight.item() == (after if after is not None else -0.28125 - velocity / 4)


def test_a_run_in_parts_released_learns_as_one_whose_gradients_wait() -> None:
    method = FedAvg(tiny_graph())
    (task,) = method.assign(0, [0])
    waiting = replace(PLAIN, micro_batch=3, activation_checkpointing="auto")
    one, other = (train(method, task, tiny_state(), replace(waiting, release_gradients=r)) for r in (False, True))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for name, value in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], value, rtol=1e-4, atol=1e-6)
    assert other.peak_bytes < one.peak_bytes


def test_where_gradients_are_summed_elsewhere_they_cannot_be_released() -> None:
    others: tuple[dict[str, object], ...] = (
        {"update_rule": "adamw"},
        {"momentum": 0.0},
        {"momentum_dtype": "bfloat16"},
        {"optimizer": own_optimizer},
    )
    for other in others:
        with pytest.raises(BadInput, match="parts of 4 of a batch of 8 can be released .* the momentum of sgd"):
            LocalTraining(8, 4, release_gradients=True, **other)  # type: ignore[arg-type]
        LocalTraining(8, 8, release_gradients=True, **other)  # type: ignore[arg-type]  # one part
    with pytest.raises(BadInput, match="clipping goes by all gradients together"):
        Execution(clip=1.0, release_gradients=True)
    method = FjORD(tiny_graph(), (0.5, 0.25))
    with pytest.raises(BadInput, match="levels"):
        train(method, method.assign(0, [0])[0], tiny_state(), replace(PLAIN, release_gradients=True))


# --- momentum in bfloat16 ---------------------------------------------------------------------------------------------


def test_momentum_in_bfloat16_by_hand() -> None:
    """bfloat16 has 8 bits: from 1 to 2 it is a multiple of 1/128. Gradient g = w; lr 1/4, momentum 1/2, no decay.

    v1 = 1 + 3/512: kept as 1 + 1/128 (0.75 of the way up). w1 = w0 - v1 / 4.
    v2 = (1 + 1/128) / 2 + g2, in full precision for the step."""
    parameter = nn.Parameter(torch.tensor([1 + 3 / 512]))
    optimizer = LeanSGD([parameter], lr=0.25, momentum=0.5, weight_decay=0.0)
    parameter.grad = parameter.detach().clone()
    optimizer.step()
    kept = optimizer.state[parameter]["momentum_buffer"]
    first = (1 + 3 / 512) * 0.75
    assert kept.dtype == torch.bfloat16 and kept.item() == 1 + 1 / 128 and parameter.item() == first
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    assert parameter.item() == first - 0.25 * (1.5 + 1 / 256)
    assert kept.item() == 1.5  # half-way between 1.5 and 1.5 + 1/128: to the even one


def test_weight_decay_beside_it_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    parameter.grad = torch.tensor([1.0])
    LeanSGD([parameter], lr=0.5, momentum=0.5, weight_decay=0.25).step()
    assert parameter.item() == 2 - 0.5 * (1 + 0.25 * 2)


def test_near_full_precision() -> None:
    method = FedAvg(tiny_graph())
    (task,) = method.assign(0, [0])
    one, other = (train(method, task, tiny_state(), replace(PLAIN, momentum_dtype=d)) for d in ("float32", "bfloat16"))
    start = tiny_state()
    for name, tensor in one.tensors.items():
        moved = (tensor - start[name]).norm()
        assert (tensor - other.tensors[name]).norm() < 0.02 * moved
    assert not same_bits(one.tensors, other.tensors)


def test_momentum_that_is_not_there_or_not_ours() -> None:
    with pytest.raises(BadInput, match="without momentum none is kept in bfloat16"):
        Execution(momentum=0.0, momentum_dtype="bfloat16")
    with pytest.raises(BadInput, match="momentum_dtype must be one of float32, bfloat16"):
        Execution(momentum_dtype="float16")
    with pytest.raises(BadInput, match="optimizer of your own"):
        LocalTraining(optimizer=torch.optim.Adam, momentum_dtype="bfloat16")  # type: ignore[arg-type]


# --- whoever simulates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"release_gradients": True},
        {"momentum_dtype": "bfloat16"},
        {"frozen_chunk": 2},
        {"frozen_weights": "mapped"},
    ],
    ids=str,
)
def test_devices_are_on_their_own(more: dict[str, object]) -> None:
    graph = tiny_graph()
    tasks = Small(graph, (0.5,)).assign(0, [0, 1])
    assert cohorts(workspace_of(graph), tasks, [8] * 2, PLAIN) == [[0, 1]]
    assert cohorts(workspace_of(graph), tasks, [8] * 2, replace(PLAIN, **more)) == [[0], [1]]  # type: ignore[arg-type]


# --- frozen layers in chunks ------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """The batch is normalised at once; a residual connection, an in-place activation and a view on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(3)
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.head = nn.Linear(8 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y = nn.functional.relu(norm(layer(x)), inplace=True)
            x = y if index == 0 else x + y
        return self.head(x.view(x.size(0), -1))


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "auto"}, {"micro_batch": 6}], ids=str)
def test_chunks_of_the_frozen_part_give_the_same_update(precision: torch.dtype, more: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Normed().to(precision)
    graph = ChannelGraph(model, (3, 6, 6))
    workspace = workspace_of(graph)
    x, y = torch.randn(11, 3, 6, 6, dtype=precision), torch.randint(5, (11,))
    for cut in (graph.slt(2, 3, 0.5), graph.slt(graph.depth, graph.depth, 1.0)):
        found = []
        for chunk in (None, 4):
            small = workspace.submodel(cut)
            small.load(cut.extract(model.state_dict()))
            settings = replace(LocalTraining(batch_size=11, frozen_chunk=chunk), **more)  # type: ignore[arg-type]
            trainer = Trainer(workspace, Phase(cut), settings, lr=0.1)
            assert chunk is None or workspace.placement(cut, settings).chunked  # type: ignore[union-attr]
            losses = [trainer.step((x,), y) for _ in range(3)]
            found.append((losses, {name: tensor.detach().clone() for name, tensor in small.state.items()}))
        close = 1e-12 if precision == torch.float64 else 2e-5
        assert found[0][0] == pytest.approx(found[1][0], rel=close)
        for name, tensor in found[0][1].items():  # running statistics and counts of batches as well
            torch.testing.assert_close(found[1][1][name], tensor, rtol=close, atol=close)


# --- frozen weights in a mapped file ----------------------------------------------------------------------------------


def test_mapped_weights_give_the_same_bits_and_follow_the_server() -> None:
    graph = tiny_graph()
    method = SLT(hand_plan(graph, (2, 3, 0.5, 9)))
    mapped = replace(PLAIN, frozen_weights="mapped")
    for seed in (0, 1, 1):  # other frozen weights from round to round, and the same
        (task,) = method.assign(0, [0])
        state = tiny_state(seed)
        one, other = (train(method, task, state, settings) for settings in (PLAIN, mapped))
        assert one.loss == other.loss and same_bits(one.tensors, other.tensors)
    small = workspace_of(graph).submodel(task.cut, maps=True)
    assert small.mapped is not None and small.mapped.bytes > 0
    assert small.bytes == workspace_of(graph).submodel(task.cut).bytes - small.mapped.bytes
    assert other.peak_bytes == one.peak_bytes - small.mapped.bytes


def test_a_forked_process_has_a_file_of_its_own() -> None:
    layer = nn.Linear(3, 2).requires_grad_(False)
    before = layer.weight.detach().clone()
    mapped = MappedWeights(layer)
    assert torch.equal(layer.weight, before) and is_mapped(layer.weight)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        mapped.write("weight", torch.zeros(2, 3))
        os.write(write, b"zero" if not layer.weight.any() else b"kept")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 4) == b"zero" and torch.equal(layer.weight, before)
    mapped.write("weight", 2 * before)
    assert torch.equal(layer.weight, 2 * before)


def test_systems_and_devices_that_cannot_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MAP_SHARED")
    with pytest.raises(BadInput, match="leave frozen_weights at memory"):
        LocalTraining(frozen_weights="mapped")
