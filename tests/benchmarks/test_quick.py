"""The benchmark compares like with like, and its numbers reach the page only from the JSON."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from benchmarks import common, plain, run_all, tables
from benchmarks import kernels as kernels_benchmark
from strata.data.augmentation import random_crop
from strata.data.images import ImageSet, normalise
from strata.graph import ChannelGraph
from strata.methods import Task
from strata.models import resnet20
from strata.training import LocalTraining, Workspace, train_device

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def some_images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=draw)


def doubles(images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return normalise(images, MEAN, STD).double()


@pytest.fixture(scope="module")
def exported_in_float64() -> ChannelGraph:
    common.graph()  # kept, and in float32: before the default changes
    torch.set_default_dtype(torch.float64)
    try:
        return ChannelGraph(resnet20(), (3, 32, 32))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", ["0.125", "slt-middle"])
def test_a_plain_step_is_a_step_of_the_reference(case: str, exported_in_float64: ChannelGraph) -> None:
    """One batch of 32, so that the order in which each side draws its samples does not matter."""
    graph = exported_in_float64
    cut = graph.prefix(0.125) if case == "0.125" else graph.slt(7, 8, 0.187)
    assert cut.shapes == common.cut_of(case).shapes and cut.frozen == common.cut_of(case).frozen
    images, labels = some_images(32)
    full = {name: tensor.double() for name, tensor in common.model().state_dict().items()}
    received = cut.extract(full)
    settings = LocalTraining(batch_size=32, transform=doubles, preparation=doubles)
    own = ImageSet(images, labels)
    update = train_device(Workspace(graph), Task(0, 0, cut), received, own, settings, common.LR, seed=0)
    model = graph.submodel(cut, cut.extract(full))
    seen = plain.train_device(model, TensorDataset(doubles(images), labels), common.LR)  # type: ignore[arg-type]
    assert seen == update.samples == 32
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert_same_step(update.tensors, trained, received, tolerance=1e-10)


def test_a_plain_step_is_a_step_of_the_reference_in_float32() -> None:
    """With channels last torch's batch norm is exact only to 1e-5; probably ReLUs flip. So loose."""
    images, labels = some_images(32)
    cut = common.cut_of("0.125")
    settings = LocalTraining(batch_size=32, augmentation="none", mean=MEAN, std=STD)
    received = cut.extract(common.model().state_dict())
    own = ImageSet(images, labels)
    update = train_device(common.workspace(), Task(0, 0, cut), received, own, settings, common.LR, seed=0)
    model = copy.deepcopy(plain.plain_model("0.125"))
    plain.train_device(model, plain.PilImages(images, labels, plain.Prepare(MEAN, STD, False)), common.LR)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert_same_step(update.tensors, trained, received, tolerance=0.02)


def assert_same_step(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], before: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Both moved the same parameters by the same amounts, relative to how far they moved."""
    assert set(ours) == set(theirs)
    for name in ours:
        assert not torch.equal(ours[name], before[name]), name
    moved, apart = (
        torch.cat([(one[name] - other[name]).flatten() for name in ours]).norm()
        for one, other in ((ours, before), (ours, theirs))
    )
    assert apart <= tolerance * moved, apart / moved


def test_both_train_every_sample_once() -> None:
    images, labels = some_images(70)  # the last batch is short
    cut = common.cut_of("0.125")
    settings = LocalTraining(batch_size=32, augmentation="cifar", mean=MEAN, std=STD)
    received = cut.extract(common.model().state_dict())
    own = ImageSet(images, labels)
    update = train_device(common.workspace(), Task(0, 0, cut), received, own, settings, common.LR, seed=0)
    samples = plain.PilImages(images, labels, plain.Prepare(MEAN, STD, True))
    assert plain.train_device(plain.plain_model("0.125"), samples, common.LR) == update.samples == 70


def test_per_sample_transforms_are_the_batched_ones() -> None:
    images, _ = some_images(40)
    prepare = plain.Prepare(MEAN, STD, augment=False)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    assert torch.equal(torch.stack([prepare(picture) for picture in pictures]), normalise(images, MEAN, STD))
    augment = plain.Prepare((0.0,) * 3, (1.0,) * 3, augment=True)
    padded = torch.nn.functional.pad(images[0], (4, 4, 4, 4))
    windows = {
        (window.flip(2) if flip else window).numpy().tobytes()
        for y in range(9) for x in range(9) for flip in (False, True)
        for window in [padded[:, y : y + 32, x : x + 32]]
    }  # fmt: skip
    for _ in range(20):
        drawn = (augment(pictures[0]) * 255).round().to(torch.uint8)
        assert drawn.numpy().tobytes() in windows
    assert random_crop(images[:1], 4, torch.Generator().manual_seed(0))[0].numpy().tobytes() in windows


def test_averages() -> None:
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([3.0, 6.0]), "n": torch.tensor(3)},
    ]
    mean = plain.average(states)
    assert mean["w"].tolist() == [2.0, 4.0] and mean["n"].dtype == torch.int64


def canned() -> dict[str, Any]:
    one = {
        "strata": 4000.0, "plain_default": 100.0, "plain_best": 1000.0, "plain_best_threads": 1, "flower": None,
        "over_plain_default": 40.0, "over_plain_best": 4.0, "over_flower": None, "share_of_peak": 0.125,
    }  # fmt: skip
    ours = {"seconds": 5.0, "train_seconds": 2.0, "evaluate_seconds": 2.9, "outside_share": 0.02}
    theirs = {
        "seconds": 35.0,
        "train_seconds": 10.0,
        "evaluate_seconds": 25.0,
        "train_threads": 1,
        "evaluate_threads": 2,
    }
    results: dict[str, Any] = {
        "machine": {"cores": 2, "cpu": "some CPU", "ram_gib": 8.0, "load_average_before": 0.1},
        "versions": {"torch": "2.13.0"}, "commit": "abc", "time": "2026-01-01T00:00:00Z", "data": "random images",
        "quick": False, "seconds": 120.0,
        "training": {
            "peak": {"one_core_gflops": 90.0, "cores": 2, "all_cores_gflops": 180.0},
            "flower": {"status": "not installed"}, "cases": [{"case": "0.125", "title": "scale 0.125", **one}],
        },
        "rounds": {
            "images": 10_000, "over_plain": 7.0, "outside_share": 0.02,
            "cases": [{"title": "step 1", "strata": ours, "plain": theirs, "over_plain": 7.0}],
        },
        "fleet": {"fleets": [{"devices": 100_000, "server_mib": 321.4, "round_seconds": 0.0456}]},
        "planning": {"results": [{
            "network": "resnet20", "parameters": 1000, "accounting": "paper", "constraint": 0.25, "steps": 3,
            "export_seconds": 1.0, "plan_seconds": 0.25, "limit_seconds": 0.5,
        }]},
        "profile": {"cases": [{"title": "training", "shares": {"batch norm": 0.25, "other": 0.75}}]},
    }  # fmt: skip
    return {**results, "goals": [goal.to_json() for goal in tables.goals(results)]}


def test_goals_are_judged_honestly() -> None:
    by_target = {(goal["text"], goal["target"]): goal["met"] for goal in canned()["goals"]}
    met = {target: verdict for (_, target), verdict in by_target.items()}
    assert met[5] is False and met[30] is True and met[6] is True and met[0.05] is True
    assert met[2.2] is None and met[0.55] is None and met[3] is None  # not in this JSON: not measured


def test_the_page_is_filled_from_the_json(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(run_all.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    tables.write_docs(page, canned())
    once = page.read_text(encoding="utf-8")
    assert "Not measured yet" not in once
    for expected in (" 4.0x |", "**no**", "12.5%", "321 MiB", "46 ms", "2.90 s", "Flower: not installed", "0.250 s"):
        assert expected in once, expected
    tables.write_docs(page, canned())
    assert page.read_text(encoding="utf-8") == once
    page.write_text("no places here", encoding="utf-8")
    with pytest.raises(ValueError, match="bench:source"):
        tables.write_docs(page, canned())


@pytest.mark.usefixtures("compiler")
def test_kernels() -> None:
    found = kernels_benchmark.measure(quick=True)
    assert list(found) == list(kernels_benchmark.CASES)
    assert all(0 < milliseconds < float("inf") for one in found.values() for milliseconds in one.values())
