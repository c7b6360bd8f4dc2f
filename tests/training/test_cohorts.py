"""Vectorised cohorts: the same training as device by device, chosen by settings alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.data import ImageSet
from strata.graph import ChannelGraph, Cut
from strata.methods import Phase, Task
from strata.models import resnet20
from strata.training import LocalTraining, train_device
from strata.training.cohorts import COHORT, cohorts, narrow, train_cohort
from strata.training.vectorised import Grouped, NotVectorisable
from tests import networks
from tests.networks import NETWORKS
from tests.workspaces import workspace_of

SETTINGS = LocalTraining(batch_size=8, proximal=0.1)


class Narrow(nn.Module):
    """Every operation that has a grouped form, and few layers, so that float32 rounding stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.norm = nn.GroupNorm(3, 6)
        self.squeeze, self.excite = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1)
        self.down = nn.Conv2d(6, 8, 3, 2, 1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(8 * 4, 12)
        self.classifier = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = functional.silu(self.norm(self.depthwise(x)))
        y = y * torch.sigmoid(self.excite(functional.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        x = self.pool(self.down(x + y))
        return self.classifier(functional.gelu(self.hidden(x.flatten(1))))


class Joined(nn.Module):
    """Maps side by side, then features side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 6, 3, 2), nn.Conv2d(6, 4, 3), nn.Conv2d(6, 6, 3)
        self.after, self.beside = nn.Linear(10, 8), nn.Linear(10, 4)
        self.classifier = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        y = torch.cat([self.left(x), self.right(x)], 1).flatten(1)
        return self.classifier(torch.cat([functional.relu(self.after(y)), self.beside(y)], 1))


MADE = {"narrow": (Narrow, (3, 8, 8)), "joined": (Joined, (3, 8, 8))}


@cache
def graph_of(name: str) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    if name == "narrow":
        return (model := Narrow()), ChannelGraph(model, (3, 8, 8))
    return (model := resnet20()), networks.graph_of("resnet20")


def device_data(devices: int, samples: int, shape: tuple[int, ...]) -> list[ImageSet]:
    generator = torch.Generator().manual_seed(4)
    return [
        ImageSet(
            torch.randint(0, 256, (samples, *shape), generator=generator, dtype=torch.uint8),
            torch.randint(0, 10, (samples,), generator=generator),
        )
        for _ in range(devices)
    ]


CUTS = {
    "prefix": lambda g: g.prefix(0.5),
    "start": lambda g: g.slt(0, 0, 0.34),
    "frozen": lambda g: g.slt(1, 2, 0.5),
    "deep": lambda g: g.slt(g.depth - 2, g.depth - 1, 0.5),
    "full": lambda g: g.full(),
}


@cache
def double(name: str) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(1)
    make, shape = MADE.get(name) or (lambda: NETWORKS[name]()[0], (3, 32, 32))
    return (model := make()), ChannelGraph(model, shape)


JOINED = [(name, kind) for name in ("joined", "densenet") for kind in ("prefix", "start")]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in ("narrow", "resnet20") for kind in CUTS] + JOINED)
def test_gradients_of_a_group_are_those_of_its_devices(name: str, kind: str) -> None:
    """In float64, so that only a wrong formula can make a difference."""
    torch.set_default_dtype(torch.float64)
    try:
        model, graph = double(name)
        torch.manual_seed(1)
        cut: Cut = CUTS[kind](graph)
        group = Grouped(graph, cut, 3)
        received = [
            {n: t + 0.01 * d * torch.randn_like(t) if t.is_floating_point() else t for n, t in part.items()}
            for d, part in enumerate([cut.extract(model.state_dict())] * 3)
        ]
        group.load(received)
        images = [torch.randn(4, *graph.input_shape) for _ in range(3)]
        labels = [torch.randint(0, 10, (4,)) for _ in range(3)]
        outputs = group([(one,) for one in images])
        sum(functional.cross_entropy(o, y) for o, y in zip(outputs, labels, strict=True)).backward()  # type: ignore[union-attr]
        for d in range(3):
            alone = graph.submodel(cut, received[d]).train()
            loss = functional.cross_entropy(alone(images[d]), labels[d])
            torch.testing.assert_close(functional.cross_entropy(outputs[d], labels[d]), loss)
            loss.backward()
            for n, parameter in alone.named_parameters():
                if parameter.requires_grad:
                    gradient = group.own[n].grad
                    assert gradient is not None
                    torch.testing.assert_close(gradient.reshape(3, *parameter.shape)[d], parameter.grad)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_cohort_trains_like_its_devices_one_by_one_and_repeats_its_bits() -> None:
    model, graph = graph_of("narrow")
    generator = torch.Generator().manual_seed(2)
    tasks = [Task(3, device, graph.random(0.67, generator)) for device in (7, 1, 4)]  # other channels on each
    data = device_data(3, 20, (3, 8, 8))  # the last batch is short
    parts = [task.cut.extract(model.state_dict()) for task in tasks]
    updates = train_cohort(workspace_of(graph), tasks, parts, data, SETTINGS, lr=0.05, seed=9)
    again = train_cohort(workspace_of(graph), tasks, parts, data, SETTINGS, lr=0.05, seed=9)
    assert updates is not None and again is not None
    for task, part, own, update, repeated in zip(tasks, parts, data, updates, again, strict=True):
        alone = train_device(workspace_of(graph), task, part, own, SETTINGS, lr=0.05, seed=9)
        assert (update.round, update.device, update.samples) == (3, task.device, 20)
        assert update.cut_hash == task.cut.hash and update.peak_bytes == alone.peak_bytes
        assert update.loss == pytest.approx(alone.loss, rel=1e-4)
        assert list(update.tensors) == list(alone.tensors)
        for n, tensor in update.tensors.items():
            torch.testing.assert_close(tensor, alone.tensors[n], rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")
            assert torch.equal(tensor, repeated.tensors[n])


def test_one_bad_device_does_not_touch_the_others() -> None:
    model, graph = graph_of("narrow")
    cut = graph.prefix(0.5)
    tasks = [Task(0, device, cut) for device in range(3)]
    data = device_data(3, 16, (3, 8, 8))
    good = cut.extract(model.state_dict())
    bad = {n: torch.full_like(t, float("nan")) if t.is_floating_point() else t for n, t in good.items()}
    clean = train_cohort(workspace_of(graph), tasks, [good] * 3, data, SETTINGS, 0.05, 9)
    mixed = train_cohort(workspace_of(graph), tasks, [good, bad, good], data, SETTINGS, 0.05, 9)
    assert clean is not None and mixed is not None
    for d in (0, 2):
        assert all(torch.equal(clean[d].tensors[n], mixed[d].tensors[n]) for n in cut.trained)
    assert mixed[1].loss != mixed[1].loss


def test_cohorts_by_hand() -> None:
    _, graph = graph_of("resnet20")
    assert narrow(graph, graph.prefix(0.125)) and narrow(graph, graph.slt(0, 1, 0.062))
    assert not narrow(graph, graph.full()) and not narrow(graph, graph.prefix(0.5))
    thin, wide = graph.prefix(0.125), graph.full()
    tasks = [Task(0, d, wide if d == 3 else thin) for d in range(9)]
    samples = [50] * 8 + [40]
    assert COHORT == 5
    assert cohorts(workspace_of(graph), tasks, samples, LocalTraining()) == [[0, 1, 2, 4], [5, 6, 7], [3], [8]]
    assert cohorts(workspace_of(graph), tasks, samples, LocalTraining(), exact=True) == [[d] for d in range(9)]
    assert cohorts(workspace_of(graph), tasks, samples, LocalTraining(micro_batch=4)) == [[d] for d in range(9)]
    random = [Task(0, d, graph.random(0.125, torch.Generator().manual_seed(d))) for d in range(4)]
    workspace = workspace_of(graph)
    assert cohorts(workspace, random, [50] * 4, LocalTraining()) == [[0, 1, 2, 3]]  # same structure, other channels
    levels = [Task(0, d, thin, (Phase(thin, levels=(graph.prefix(0.07), thin)),)) for d in range(2)]
    assert cohorts(workspace, levels, [50] * 2, LocalTraining()) == [[0], [1]]


def test_maps_beside_those_of_frozen_layers_are_trained_one_by_one() -> None:
    graph = networks.graph_of("densenet")
    with pytest.raises(NotVectorisable, match="frozen layers put out"):
        Grouped(graph, graph.slt(2, 3, 0.25), 2)


@pytest.mark.parametrize("name", ["vgg", "hf_vit", "gated"])
def test_what_has_no_grouped_form_is_trained_one_by_one(name: str) -> None:
    model, shape = NETWORKS[name]()
    graph = networks.graph_of(name)
    cut = graph.prefix(0.25)
    with pytest.raises(NotVectorisable):
        Grouped(graph, cut, 2)
    part = cut.extract(model.state_dict())
    tasks = [Task(0, d, cut) for d in range(2)]
    assert train_cohort(workspace_of(graph), tasks, [part] * 2, device_data(2, 4, shape), SETTINGS, 0.1, 0) is None


class FixedNorm(nn.Module):
    """A batch norm that keeps its statistics also in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.classifier = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 10)

    def train(self, mode: bool = True) -> FixedNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.second(functional.relu(self.norm(self.first(x)))).mean((2, 3)))


class SpatialGate(nn.Module):
    """Maps times a map of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.classifier = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 3, padding=1), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.classifier((x * torch.sigmoid(self.gate(x))).mean((2, 3)))


@pytest.mark.parametrize("make", [FixedNorm, SpatialGate])
def test_what_one_network_would_compute_otherwise_is_refused(make: type[nn.Module]) -> None:
    graph = ChannelGraph(make(), (3, 8, 8))
    with pytest.raises(NotVectorisable, match="fixed statistics|numbers of channels"):
        Grouped(graph, graph.slt(1, 2, 0.5), 2)


def test_what_the_user_has_frozen_behind_trained_layers_is_refused() -> None:
    model = Narrow()
    model.down.requires_grad_(False)
    graph = ChannelGraph(model, (3, 8, 8))
    with pytest.raises(NotVectorisable, match="user has frozen"):
        Grouped(graph, graph.prefix(0.5), 2)


class Features(nn.Module):
    """A residual sum of features, of which a head takes some; and a batch norm on maps of one position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 8), nn.BatchNorm2d(8)
        self.a, self.b, self.classifier = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.first(x))).flatten(1)
        x = x + functional.relu(self.a(x))
        return self.classifier(x + functional.relu(self.b(x)))


@pytest.mark.parametrize("kind", ["frozen", "deep", "prefix"])
def test_sums_of_features_and_a_last_batch_of_one(kind: str) -> None:
    torch.manual_seed(0)
    graph = ChannelGraph(model := Features(), (3, 8, 8))
    cut = CUTS[kind](graph)
    part = cut.extract(model.state_dict())
    tasks, own = [Task(0, d, cut) for d in range(2)], device_data(2, 9, (3, 8, 8))
    together = train_cohort(workspace_of(graph), tasks, [part] * 2, own, SETTINGS, 0.1, 0)
    assert together is not None
    for task, data, update in zip(tasks, own, together, strict=True):
        alone = train_device(workspace_of(graph), task, part, data, SETTINGS, 0.1, 0)
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(update.tensors[name], tensor, rtol=1e-4, atol=1e-5)
