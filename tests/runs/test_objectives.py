"""Runs by the other objectives: several labels, tokens that follow, a class for each pixel."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

import strata
from strata.core.errors import BadInput
from strata.data import IGNORED, FederatedData, MultiLabel, NextToken, PerPosition, Samples
from strata.execution import Execution, measure_cut, memory
from strata.graph import ChannelGraph
from strata.runs import Result
from strata.training import LocalTraining


class Letters(nn.Module):
    """[batch, 6] -> [batch, 6, 5]: what follows each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.hidden, self.scores = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.scores(torch.relu(self.hidden(self.table(input_ids))))


def letters(count: int) -> Samples:
    """The letter after n is n + 1, modulo 4; the fifth is padding, and so are the last two places."""
    ids = (torch.arange(count).view(-1, 1) + torch.arange(7)) % 4
    ids[:, 5:] = 4
    targets = ids[:, 1:].clone()
    targets[:, 4:] = IGNORED
    return Samples({"input_ids": ids[:, :6].contiguous()}, targets)


def pictures(count: int) -> Samples:
    """A pixel's class is whether it is light."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 3, 4, 4), generator=generator, dtype=torch.uint8)
    return Samples({"x": images}, (images.float().mean(1) > 127).long())


def numbers(count: int) -> Samples:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return Samples({"x": x}, x[:, :3] > 0)


def seeded(make: object) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()  # type: ignore[operator,no-any-return]


def run(model: nn.Module, data: FederatedData, out: Path, method: str = "fedavg", **options: object) -> Result:
    settings = {"rounds": 3, "devices": 4, "per_round": 4, "lr": 0.5, "eval_every": 3, **options}
    return strata.run(model, data, method, out=out, progress=False, workers=0, **settings)  # type: ignore[arg-type]


def test_tokens_that_follow(tmp_path: Path) -> None:
    data = FederatedData(letters(160), letters(8), "letters", 5, objective=NextToken())
    result = run(seeded(Letters), data, tmp_path / "run", rounds=8, eval_every=8)
    model = Letters()
    model.load_state_dict(result.state_dict())
    with torch.inference_mode():
        scores = model(data.test.inputs["input_ids"])[:, :4].flatten(0, 1)
    wanted = data.test.targets[:, :4].flatten()
    lost = nn.functional.cross_entropy(scores, wanted).item()
    assert result.accuracy == (scores.argmax(1) == wanted).double().mean().item() == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] == pytest.approx(lost) and "per_class_accuracy" not in summary
    assert summary["metrics"] == {"perplexity": pytest.approx(math.exp(lost))}
    assert [record["metrics"] for record in result.metrics] == [None] * 7 + [summary["metrics"]]


def test_a_class_for_each_pixel(tmp_path: Path) -> None:
    network = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    )
    data = FederatedData(pictures(160), pictures(40), "pixels", 2, objective=PerPosition())
    graph = ChannelGraph(network, data.inputs)
    assert graph.classes == 2 and graph.output_shape == (2, 4, 4)
    result = run(network, data, tmp_path / "run")
    network.load_state_dict(result.state_dict())
    with torch.inference_mode():
        found = network(data.test.inputs["x"] / 255).argmax(1)
    wanted = data.test.targets
    assert result.accuracy == pytest.approx((found == wanted).double().mean().item(), abs=0.01)
    each = [((found == c) & (wanted == c)).sum().item() / ((found == c) | (wanted == c)).sum().item() for c in (0, 1)]
    assert result.summary["metrics"]["mean_iou"] == pytest.approx(sum(each) / 2, abs=0.01)
    assert result.summary["iou"] == pytest.approx(each, abs=0.01)


def test_images_are_not_cropped_away_from_their_targets(tmp_path: Path) -> None:
    network = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    data = FederatedData(pictures(16), pictures(8), "pixels", 2, objective=PerPosition())
    with pytest.raises(BadInput, match="augmentation cifar does not suit pixels: its images would be cropped and flip"):
        run(network, data, tmp_path / "run", training=LocalTraining(augmentation="cifar"))
    assert not (tmp_path / "run").exists()
    run(network, replace(data, augmentation="cifar"), tmp_path / "own", rounds=1)  # only the data's default
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["settings"]["training"]["augmentation"] == "none"
    said = "the augmentation of pixels, cifar, is left out: its images"
    assert said in (tmp_path / "own" / "run.log").read_text()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out((left - right).mean((2, 3)))


def test_two_images_are_not_cropped_apart(tmp_path: Path) -> None:
    images = pictures(8).inputs["x"]
    part = Samples({"left": images, "right": images}, torch.arange(8) % 2)
    data = FederatedData(part, part, "pairs", 2)
    with pytest.raises(BadInput, match=r"does not suit pairs: each of its images \(left, right\) would be cropped"):
        run(Pair(), data, tmp_path / "run", training=LocalTraining(augmentation="cifar"))


def test_several_labels(tmp_path: Path) -> None:
    network = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    data = FederatedData(numbers(160), numbers(40), "labels", 3, objective=MultiLabel())
    result = run(network, data, tmp_path / "run", rounds=6, eval_every=6)
    network.load_state_dict(result.state_dict())
    with torch.inference_mode():
        found = network(data.test.inputs["x"])
    wanted, further = data.test.targets.numpy(), result.summary["metrics"]
    assert result.accuracy == further["f1_micro"] == pytest.approx(f1_score(wanted, found > 0, average="micro"))
    assert further["f1_macro"] == pytest.approx(f1_score(wanted, found > 0, average="macro"))
    assert further["auc"] == pytest.approx(roc_auc_score(wanted, found, average="macro"), abs=0.01)
    assert 0.5 < result.accuracy < 1 and len(result.summary["f1_of_labels"]) == 3


def test_models_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    data = FederatedData(letters(8), letters(8), "letters", 6, objective=NextToken())
    with pytest.raises(
        BadInput, match=r"returns \[N, 6, 5\] and letters has targets \[N, 6\] of 6 classes, to learn by next"
    ):
        run(Letters(), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class OneTable(Letters):
    """Scores by the table itself; from three letters on, what follows is told by what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
        self.scores.weight = self.table.weight


def test_a_tied_model_of_language_within_a_budget(tmp_path: Path) -> None:
    data = FederatedData(letters(40), letters(12), "letters", 5, objective=NextToken())
    model = seeded(OneTable)
    graph = ChannelGraph(model, data.inputs)
    step = Execution(batch_size=8)
    budget = memory(graph, graph.window(1, 2), step).total
    for cut in (graph.full(), graph.window(1, 2)):
        assert memory(graph, cut, step).total == pytest.approx(measure_cut(graph, cut, step).peak, rel=0.01)
    given = {"rounds": 3, "devices": 2, "per_round": 2, "workers": 0, "progress": False, "lr": 0.5}
    given["training"] = LocalTraining(batch_size=8, epochs=3)
    result = strata.run(model, data, "window", out=tmp_path / "a", budget=budget, **given)
    state = result.state_dict()
    assert torch.equal(state["scores.weight"], state["table.weight"]), "both names, for the plain model"
    fresh = OneTable()
    fresh.load_state_dict(state)
    assert fresh.scores.weight is fresh.table.weight and result.summary["budget"]["over_bytes"] == 0
    sent = [record["upload_bytes"] for record in result.metrics]
    assert sent == [4 * 2 * (5 * 8 + 8 * 8 + 8)] * 3, "the table once, by two devices: it is in every window"
