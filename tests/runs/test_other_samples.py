"""Runs on something else than images and classes: ids, several named inputs, numbers to predict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import strata
from strata.core.errors import BadInput
from strata.data import FederatedData, Regression, Samples
from strata.runs import Result
from strata.training import LocalTraining
from tests.federation.tiny import bits

WORDS, LENGTH, CLASSES = 20, 6, 3


class Bag(nn.Module):
    """Ids [batch, length] -> scores: the mean of the words' vectors through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.hidden = nn.Linear(16, 32)
        self.deeper = nn.Linear(32, 32)
        self.scores = nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.hidden(self.words(ids).mean(1)))
        return self.scores(torch.relu(self.deeper(x)))


def texts(count: int, generator: torch.Generator) -> Samples:
    """Four words of six are of the sample's class: a word's is its id modulo 3."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
    own = torch.randint(6, (count, 4), generator=generator) * CLASSES + labels.unsqueeze(1)
    ids[:, :4] = own
    return Samples({"ids": ids}, labels)


class Photo(nn.Module):
    """An image beside what is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.known = nn.Linear(4, 8)
        self.both = nn.Linear(16, 16)
        self.scores = nn.Linear(16, 4)

    def forward(self, image: Tensor, metadata: Tensor) -> Tensor:
        seen = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        both = torch.cat([seen, torch.relu(self.known(metadata))], 1)
        return self.scores(torch.relu(self.both(both)))


def photos(count: int, generator: torch.Generator) -> Samples:
    """A class says whether the image is red and whether the first of four numbers is positive: it takes both."""
    labels = torch.randint(4, (count,), generator=generator)
    image = torch.randint(0, 100, (count, 3, 8, 8), generator=generator)
    image[:, 0] += 120 * (labels % 2).view(-1, 1, 1)
    metadata = torch.randn(count, 4, generator=generator)
    metadata[:, 0] = metadata[:, 0].abs() * (labels // 2 * 2 - 1)
    return Samples({"metadata": metadata, "image": image.to(torch.uint8)}, labels)  # not in forward's order


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def points(count: int, generator: torch.Generator) -> Samples:
    x = torch.randn(count, 5, generator=generator)
    return Samples({"x": x}, torch.stack([x[:, 0] - x[:, 1], 0.5 * x[:, 2]], 1))


def model_of(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def data_of(kind: type[nn.Module]) -> FederatedData:
    generator = torch.Generator().manual_seed(1)
    make = {Bag: texts, Photo: photos, Line: points}[kind]
    train, test = make(360, generator), make(90, generator)
    if kind is Line:
        return FederatedData(train, test, "points", 2, objective=Regression())
    return FederatedData(train, test, kind.__name__.lower(), 4 if kind is Photo else CLASSES)


def run(kind: type[nn.Module], out: Path, method: str, workers: int = 0, **options: object) -> Result:
    settings = {"rounds": 12, "devices": 12, "per_round": 4, "progress": False, "lr": 0.2, "eval_every": 4, **options}
    training = LocalTraining(batch_size=10, epochs=2)
    return strata.run(
        model_of(kind),
        data_of(kind),
        method,
        out=out,
        workers=workers,
        training=training,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("kind", "method", "options", "enough"),
    [
        (Bag, "fedavg", {}, 0.8),
        (Bag, "slt", {"constraint": 0.85}, 0.7),
        (Photo, "small", {"constraint": 0.5}, 0.7),
        (Line, "fedavg", {"lr": 0.05}, 0.8),
    ],
)
def test_it_learns_with_the_same_bits_in_one_process_and_in_two(
    kind: type[nn.Module], method: str, options: dict[str, float], enough: float, tmp_path: Path
) -> None:
    result = run(kind, tmp_path / "inline", method, **options)
    run(kind, tmp_path / "workers", method, workers=2, **options)
    assert bits(tmp_path / "inline") == bits(tmp_path / "workers")
    assert enough < result.accuracy <= 1
    first = next(record["accuracy"] for record in result.metrics if record["accuracy"] is not None)
    assert result.accuracy > first or first == 1
    assert all(record["peak_bytes"] > 0 for record in result.metrics)


def test_the_final_model_scores_as_the_summary_says(tmp_path: Path) -> None:
    for kind in (Bag, Photo, Line):
        result, data = run(kind, tmp_path / kind.__name__, "fedavg", rounds=4), data_of(kind)
        model = model_of(kind)
        model.load_state_dict(result.state_dict())
        inputs = {name: tensor / 255 if name == "image" else tensor for name, tensor in data.test.inputs.items()}
        with torch.inference_mode():
            outputs = model.eval()(**inputs)
        if kind is Line:
            targets = data.test.targets
            spread = (targets - targets.mean(0)).square().sum()
            explained = 1 - (outputs - targets).square().sum() / spread
            assert result.accuracy == pytest.approx(explained.item(), abs=1e-5)
            summary = json.loads((result.out / "summary.json").read_text())
            error = (outputs - targets).square().mean().item()
            assert summary["loss"] == pytest.approx(error) == summary["metrics"]["mean_squared_error"]
            assert result.metrics[-1]["metrics"] == summary["metrics"]
            assert "per_class_accuracy" not in summary and result.per_class_accuracy == []
        else:
            right = (outputs.argmax(1) == data.test.targets).double().mean().item()
            assert result.accuracy == pytest.approx(right, abs=1.5 / len(data.test))
            assert len(result.per_class_accuracy) == data.classes


def test_a_resumed_run_has_the_same_bits_and_other_data_is_noticed(tmp_path: Path) -> None:
    run(Photo, tmp_path / "whole", "fedavg", rounds=4)
    run(Photo, tmp_path / "again", "fedavg", rounds=4)
    assert bits(tmp_path / "whole") == bits(tmp_path / "again")
    described = json.loads((tmp_path / "whole" / "config.json").read_text())["settings"]["data"]
    assert [one["name"] for one in described["inputs"]] == ["metadata", "image"]
    data = data_of(Photo)
    other = FederatedData(Samples(data.train.inputs, data.train.targets.flip(0)), data.test, "photo", 4)
    with pytest.raises(BadInput, match="sha256"):
        strata.run(
            model_of(Photo), other, "fedavg", out=tmp_path / "whole", rounds=4, devices=12, per_round=4, lr=0.2,
            eval_every=4, progress=False, workers=0, resume=True, training=LocalTraining(batch_size=10, epochs=2),
        )  # fmt: skip


def test_what_does_not_fit_is_said_in_one_sentence(tmp_path: Path) -> None:
    data = data_of(Bag)
    longer = Samples({"ids": data.train.inputs["ids"].repeat(1, 2)}, data.train.targets)
    method = strata.methods.FedAvg(strata.graph.ChannelGraph(model_of(Bag), data.inputs))
    with pytest.raises(BadInput, match="the model takes 6 and longer has 12: make the model for 12"):
        strata.run(model_of(Bag), FederatedData(longer, longer, "longer", CLASSES), method, out=tmp_path / "a")
    with pytest.raises(BadInput, match="the augmentation cifar is for images, and bag has none"):
        strata.run(model_of(Bag), data, method, out=tmp_path / "b", training=LocalTraining(augmentation="cifar"))
    with pytest.raises(BadInput, match="2 outputs and one has 1 numbers to predict"):
        one = Samples(data_of(Line).train.inputs, data_of(Line).train.targets[:, 0])
        line = strata.methods.FedAvg(strata.graph.ChannelGraph(model_of(Line), one.spec))
        strata.run(model_of(Line), FederatedData(one, one, "one", 1, objective=Regression()), line, out=tmp_path / "c")
    with pytest.raises(BadInput, match="goes by classes, and the targets of this data are none"):
        strata.run(model_of(Line), data_of(Line), "fedavg", out=tmp_path / "d", partition="dirichlet:0.1")
    assert not list(tmp_path.iterdir())


def test_a_partition_by_hand_works_for_any_samples(tmp_path: Path) -> None:
    parts = [np.arange(0, 180), np.arange(180, 360)]
    result = run(Line, tmp_path / "run", "fedavg", rounds=2, per_round=2, devices=None, partition=parts)
    assert [sorted(record["devices"]) for record in result.metrics] == [[0, 1], [0, 1]]
