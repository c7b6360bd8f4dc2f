"""Real processes on loopback: one server, devices with budgets of their own, some of them rogues."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strata.data import load
from strata.fleet.device.own_data import load_own_data
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.models.loading import load_model
from tests.fleet import nets, rogues
from tests.fleet.loopback import Loopback, end, loopback

ROUNDS = 2
PARTS = 12  # of digits: 125 images each
DEADLINE = 120.0  # seconds; a task takes about six on an idle machine
SMALL = {"model": "tests.fleet.nets:small", "method": "slt", "rounds": ROUNDS, "batch": 16, "seed": 3, "lr": 0.1}


def device(fleet: Path, name: str, index: int, budget: int, **more: Any) -> DeviceSettings:
    return DeviceSettings(
        name, budget=budget, partition="iid", index=index, devices=PARTS, seed=3, cache=str(fleet / name / "cache"),
        **more,
    )  # fmt: skip


def records(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with loopback(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def test_rogues_cost_their_own_updates_and_devices_evaluate(fleet: Loopback, tmp_path: Path) -> None:
    small = nets.BUDGETS[0]  # the whole network takes a little more
    held: dict[str, Any] = {"hold_out": 0.2, "models": [SMALL["model"]]}
    honest = device(fleet.folder, "hen", 0, small, **held)
    fleet.device(honest)
    replaying = device(fleet.folder, "eel", 1, small, **held)
    fleet.device(replaying, rogues.REPLAYING)
    dying = fleet.device(device(fleet.folder, "fox", 2, small, models=held["models"]), rogues.HANGING)
    boasting = device(fleet.folder, "gnu", 3, small, **held)  # says five times as much
    fleet.device(boasting, rogues.BOASTING)
    out = tmp_path / "rogues"
    request = {**SMALL, "per_round": 4, "eval_every": ROUNDS}
    run = fleet.run(RunSettings(request, str(out), minimum=4, deadline=DEADLINE, evaluation="devices"))
    fleet.until(run, (fleet.folder / "fox" / "has-its-task").exists)
    end(dying, signal.SIGKILL)
    fleet.finished(run)

    names = json.loads((out / "fleet.json").read_text())["names"]
    assert names == ["eel", "fox", "gnu", "hen"]
    first, second = [{names[entry["id"]]: entry["reason"] for entry in record["dropped"]} for record in records(out)]
    assert set(first) == {"fox", "gnu"} and set(second) == {"eel", "fox", "gnu"}
    assert second["eel"] == "sent an update of round 0"
    # the deadline, or Flower's own word a little earlier; then it may still count as busy
    assert first["fox"].startswith(("no answer", "disconnected"))
    assert second["fox"].startswith(("no answer", "disconnected", "not connected", "still busy with round 0"))
    assert "not finite" in first["gnu"]  # the first step is small enough for all, but it lies
    assert "out of memory" in second["gnu"] and second["gnu"].endswith(f"moved to the level of {small} bytes")

    # the counts of all who hold something out, summed: the final model's own
    summary = json.loads((out / "summary.json").read_text())
    parts = [load_own_data(one).held for one in (honest, replaying, boasting)]
    images = torch.cat([part.images for part in parts if part is not None])
    labels = torch.cat([part.labels for part in parts if part is not None])
    model = load_model(SMALL["model"], 10, (3, 32, 32))
    model.load_state_dict(load_file(out / "model.safetensors"))
    data = load("digits").train
    with torch.inference_mode():
        right = (model.eval()(data.normalise(images)).argmax(1) == labels).sum().item()
    assert len(labels) == 75 and abs(summary["accuracy"] * 75 - right) <= 1  # other batches may turn a close call
