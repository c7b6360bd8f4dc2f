"""Accuracy, loss and counts, with both ways of batch norm, against the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.data import ImageSet
from strata.data.objectives import Classification
from strata.graph import ChannelGraph
from strata.methods import FedAvg
from strata.training import (
    BN_MODES,
    LocalTraining,
    Workspace,
    calibration_indices,
    combine,
    evaluate,
    evaluate_units,
    plain_state,
    reestimated,
    units,
)
from strata.training.statistics import CALIBRATION_BATCH
from tests.methods.tiny import CLASSES, INPUT, State, run, same_bits, samples, tiny_graph, tiny_net, tiny_state
from tests.workspaces import workspace_of

SETTINGS = LocalTraining(mean=(0.3, 0.3, 0.3), std=(0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def trained() -> State:
    return run(FedAvg(tiny_graph()), rounds=8)


def prepared(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.3) / 0.2


def test_batch_statistics_as_published(trained: State) -> None:
    """Batches of 1024 in a shuffled order, each its own statistics: the plain model in train mode."""
    images, labels = samples(7, count=1500)
    result = evaluate(
        workspace_of(tiny_graph()), tiny_graph().full(), trained, ImageSet(images, labels), SETTINGS, bn="batch"
    )
    net = tiny_net()
    net.load_state_dict(trained)
    net.train()
    order = torch.randperm(1500, generator=generator(0, "evaluation order"))
    right, total = torch.zeros(CLASSES), 0.0
    with torch.no_grad():
        for index in (order[:1024], order[1024:]):
            outputs = net(prepared(images[index]))
            total += functional.cross_entropy(outputs, labels[index], reduction="sum").item()
            right += torch.bincount(labels[index][outputs.argmax(1) == labels[index]], minlength=CLASSES)
    correct, counts = result.sums["correct"], result.sums["counts"]
    assert correct == tuple(right.int().tolist())
    assert counts == tuple(torch.bincount(labels).tolist()) and sum(counts) == 1500
    assert result.accuracy == sum(correct) / 1500 and result.bn == "batch"
    assert result.loss == pytest.approx(total / 1500, rel=1e-4)
    assert result.metrics["per_class_accuracy"] == [c / n for c, n in zip(correct, counts, strict=True)]


def test_re_estimated_statistics_by_hand(trained: State) -> None:
    """One batch: its mean and (unbiased) variance. Those of the first layer can be computed directly."""
    images, labels = samples(3, count=100)
    tensors = reestimated(workspace_of(tiny_graph()), tiny_graph().full(), trained, ImageSet(images, labels), SETTINGS)
    features = functional.conv2d(prepared(images), trained["stem.0.weight"], padding=1)
    torch.testing.assert_close(tensors["stem.1.running_mean"], features.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensors["stem.1.running_var"], features.var((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensors[name], trained[name]) for name in tiny_graph().parameter_names)
    assert torch.equal(trained["stem.1.running_mean"], torch.zeros(8)), "what it was given stays as it was"


def test_re_estimated_over_several_batches_is_their_mean(trained: State) -> None:
    images = ImageSet(*samples(3, count=512))
    both = reestimated(workspace_of(tiny_graph()), tiny_graph().full(), trained, images, SETTINGS)
    halves = [
        reestimated(workspace_of(tiny_graph()), tiny_graph().full(), trained, part, SETTINGS)
        for part in images.split(256)
    ]
    for name in tiny_graph().buffer_names:
        if "running" in name:
            mean = (halves[0][name] + halves[1][name]) / 2
            torch.testing.assert_close(both[name], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bn", BN_MODES)
def test_however_the_work_is_split(trained: State, bn: str) -> None:
    images, labels = samples(7, count=2100)
    calibration = ImageSet(*samples(8, count=64))
    whole = evaluate(
        workspace_of(tiny_graph()), tiny_graph().full(), trained, ImageSet(images, labels), SETTINGS, bn, calibration
    )
    count = units(2100, bn)
    assert count == {"batch": 3, "re-estimated": 33}[bn]
    tensors = (
        trained
        if bn == "batch"
        else reestimated(workspace_of(tiny_graph()), tiny_graph().full(), trained, calibration, SETTINGS)
    )
    parts = []
    for numbers in ([count - 1], range(1, count - 1), [0]):
        evaluate(
            workspace_of(tiny_graph()),
            tiny_graph().full(),
            tiny_state(5),
            ImageSet(images[:10], labels[:10]),
            SETTINGS,
            bn,
            calibration,
        )  # something in between
        parts += evaluate_units(
            workspace_of(tiny_graph()), tiny_graph().full(), tensors, ImageSet(images, labels), SETTINGS, bn, numbers
        )
    assert combine(parts, bn, Classification()) == whole


def test_re_estimated_is_independent_of_the_batch_and_what_the_plain_model_computes(trained: State) -> None:
    images, labels = samples(7, count=60)
    calibration = ImageSet(*samples(8, count=256))
    for cut in (tiny_graph().full(), tiny_graph().prefix(0.5), tiny_graph().slt(1, 2, 0.5)):
        result = evaluate(
            workspace_of(tiny_graph()),
            cut,
            cut.extract(trained),
            ImageSet(images, labels),
            SETTINGS,
            calibration=calibration,
        )
        net = tiny_net(seed=4)
        measured = reestimated(workspace_of(tiny_graph()), cut, cut.extract(trained), calibration, SETTINGS)
        net.load_state_dict(plain_state(cut, trained, measured))
        net.eval()
        with torch.no_grad():
            outputs = torch.cat([net(prepared(images[i : i + 1])) for i in range(60)])  # batch 1
        assert result.accuracy == int((outputs.argmax(1) == labels).sum()) / 60 == sum(result.sums["correct"]) / 60
        assert result.loss == pytest.approx(functional.cross_entropy(outputs, labels).item(), rel=1e-4)


def test_training_shows_in_both_modes(trained: State) -> None:
    images, labels = samples(7, count=300)
    calibration = ImageSet(*samples(8, count=256))
    for bn in BN_MODES:
        before = evaluate(
            workspace_of(tiny_graph()),
            tiny_graph().full(),
            tiny_state(),
            ImageSet(images, labels),
            SETTINGS,
            bn,
            calibration,
        )
        after = evaluate(
            workspace_of(tiny_graph()),
            tiny_graph().full(),
            trained,
            ImageSet(images, labels),
            SETTINGS,
            bn,
            calibration,
        )
        assert after.loss < 0.7 * before.loss and after.accuracy > before.accuracy, bn


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=8)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(torch.relu(self.norm(self.conv(x)))).flatten(1))


def test_dropout_is_off_in_both_modes() -> None:
    net = Dropping()
    graph = ChannelGraph(net, INPUT)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    own = ImageSet(*samples(7, count=40))
    workspace = Workspace(graph)
    results = {
        bn: [evaluate(workspace, graph.full(), state, own, SETTINGS, bn, own) for _ in range(3)] for bn in BN_MODES
    }
    for bn in BN_MODES:
        assert results[bn][0] == results[bn][1] == results[bn][2]
    # statistics from the very images that are judged: the two modes differ by n/(n-1) in the variance
    assert results["batch"][0].loss == pytest.approx(results["re-estimated"][0].loss, rel=0.02)


def test_no_batch_norm_needs_no_statistics() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    graph = ChannelGraph(net, INPUT)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    images, labels = samples(7, count=40)
    own, workspace = ImageSet(images, labels), Workspace(graph)
    assert same_bits(reestimated(workspace, graph.full(), state, own, SETTINGS), state)
    by_hand = functional.cross_entropy(net(prepared(images)), labels).item()
    for bn in BN_MODES:
        assert evaluate(workspace, graph.full(), state, own, SETTINGS, bn, own).loss == pytest.approx(by_hand)


def test_a_class_without_samples_has_no_accuracy() -> None:
    images, labels = samples(7, count=10)
    result = evaluate(
        workspace_of(tiny_graph()),
        tiny_graph().full(),
        tiny_state(),
        ImageSet(images, labels.clamp(max=1)),
        SETTINGS,
        "batch",
    )
    assert result.sums["counts"][2] == 0 and result.metrics["per_class_accuracy"][2] is None


def test_calibration_images_are_a_fixed_choice() -> None:
    chosen = calibration_indices(10_000, seed=1)
    assert len(set(chosen.tolist())) == 512 and torch.equal(chosen, calibration_indices(10_000, seed=1))
    assert not torch.equal(chosen, calibration_indices(10_000, seed=2))
    assert sorted(calibration_indices(30, seed=1).tolist()) == list(range(30)), "all of them where there are few"
    stored_by_class = torch.arange(10_000) // 5000
    halves = stored_by_class[chosen].float().split(CALIBRATION_BATCH)
    assert all(0.4 < half.mean() < 0.6 for half in halves), "each batch has all classes"


def test_bad_input() -> None:
    images, labels = samples(0, count=4)
    with pytest.raises(BadInput, match="re-estimated, batch"):
        evaluate(
            workspace_of(tiny_graph()),
            tiny_graph().full(),
            tiny_state(),
            ImageSet(images, labels),
            SETTINGS,
            bn="running",
        )
    with pytest.raises(BadInput, match="calibration"):
        evaluate(workspace_of(tiny_graph()), tiny_graph().full(), tiny_state(), ImageSet(images, labels), SETTINGS)
    with pytest.raises(BadInput, match="no samples"):
        evaluate(
            workspace_of(tiny_graph()),
            tiny_graph().full(),
            tiny_state(),
            ImageSet(images[:0], labels[:0]),
            SETTINGS,
            "batch",
        )
