"""The thin device's samples are those of `strata`, and so are the numbers that it draws."""

from __future__ import annotations

import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strata_device.data import Facts, prepare
from strata_device.draws import derive, randperm
from strata_device.errors import BadInput
from strata_device.settings import Settings, parse_bytes

from strata.core import seeds, sizes
from strata.fleet.device.own_data import label_digest, load_own_data
from strata.fleet.protocol.settings import DeviceSettings
from strata.training import calibration_indices


def settings(folder: Path, **more: Any) -> Settings:
    return Settings("ant", str(folder), **more).check()


def labels(folder: Path, name: str = "train") -> list[int]:
    return list(array.array("q", (folder / f"{name}.labels").read_bytes()))


def test_digits_are_those_of_strata(tmp_path: Path) -> None:
    facts = prepare(settings(tmp_path, part=2, parts=12, seed=3))
    own = load_own_data(DeviceSettings("ant", partition="iid", index=2, devices=12, seed=3))
    assert (tmp_path / "train.bin").read_bytes() == own.train.images[:, 0].contiguous().numpy().tobytes()
    assert labels(tmp_path) == own.train.labels.tolist()
    assert (facts.train, facts.held, facts.classes, facts.input, facts.stored) == (125, 0, 10, [3, 32, 32], 1)
    assert (facts.mean, facts.std, facts.labels) == (list(own.mean), list(own.std), own.labels)
    assert Facts.read(tmp_path) == facts


def test_an_npz_of_samples(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images, targets = draw.integers(0, 256, (20, 3, 6, 5), dtype=np.uint8), np.arange(20) % 4
    np.savez_compressed(tmp_path / "own.npz", images=images, labels=targets, class_names=["a", "b", "c", "d"])
    (tmp_path / "device").mkdir()
    facts = prepare(settings(tmp_path / "device", data=str(tmp_path), hold_out=0.25))
    assert (facts.train, facts.held, facts.classes, facts.input, facts.stored) == (15, 5, 4, [3, 6, 5], 3)
    assert facts.labels == label_digest(["a", "b", "c", "d"])
    rows = [(tmp_path / "device" / f"{name}.bin").read_bytes() for name in ("train", "held")]
    made = b"".join(rows)
    assert sorted(made[at : at + 90] for at in range(0, 1800, 90)) == sorted(image.tobytes() for image in images)
    scaled = torch.from_numpy(images).double().div(255)
    assert facts.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert facts.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_wrong_data_costs_one_sentence(tmp_path: Path) -> None:
    good = np.zeros((4, 8, 8), np.uint8)
    made = {
        "float": {"images": good / 2, "labels": np.zeros(4, int)},
        "short": {"images": good, "labels": np.zeros(3, int)},
        "none": {"images": good},
        "many": {"images": good, "labels": np.array([0, 1, 2, 9]), "classes": np.array([3])},
    }
    for name, arrays in made.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    whole = (tmp_path / "many.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name in (*made, "cut", "absent"):
        with pytest.raises(BadInput, match=r"should|cannot be read|--data is") as error:
            prepare(settings(tmp_path, data=str(tmp_path / f"{name}.npz")))
        assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match="4 .npz files|5 .npz files"):
        prepare(settings(tmp_path, data=str(tmp_path)))


def test_numbers_are_drawn_as_torch_draws_them() -> None:
    for seed in (0, 1, 2**32 + 17, 2**63 - 1):
        for count in (1, 2, 125, 1500):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            assert randperm(count, seed) == order.tolist()
    assert derive(9, "calibration images") == seeds.derive(9, "calibration images")
    assert randperm(700, derive(9, "calibration images"))[:512] == calibration_indices(700, 9).tolist()


@pytest.mark.parametrize("text", ["24 MiB", "1.5GB", "24000000", "7", "0", "-3MiB", "much", "9" * 30])
def test_sizes_are_read_as_strata_reads_them(text: str) -> None:
    try:
        expected = sizes.parse_bytes(text)
    except sizes.BadInput:
        with pytest.raises(BadInput):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == expected
