"""Real processes on loopback: one server, devices with budgets of their own, some of them rogues."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strata.data import load, parse_partition
from strata.fleet.device.own_data import load_own_data
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.graph import ChannelGraph
from strata.models.loading import load_model
from strata.runs import run
from strata.runs.config import RunConfig
from strata.runs.launch import make_method, make_model, make_training
from tests.fleet import nets, rogues
from tests.fleet.loopback import Loopback, end, loopback, wait_for

ROUNDS = 2
PARTS = 12  # of digits: 125 images each
DEADLINE = 120.0  # seconds; a task takes about six on an idle machine
BUDGETS = dict(zip(("ant", "bee", "cat"), nets.BUDGETS, strict=True))
REQUEST = {"method": "slt", "rounds": ROUNDS, "per_round": 3, "seed": 3, "lr": 0.1}
SMALL = {**REQUEST, "model": "tests.fleet.nets:small", "batch": 16}


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


def locally(names: dict[str, int], out: Path) -> Path:
    """The same run on the local engine: the same parts of the data, the same budgets."""
    config = RunConfig.of(**SMALL, budgets=tuple(names.values()), exact=True)
    data = load("digits")
    parts = parse_partition("iid", data, PARTS, 3)
    model = make_model(config, data)
    options = {"per_round": config.per_round, "seed": config.seed, "lr": config.lr, "exact": True}
    run(
        model, data, make_method(config, ChannelGraph(model, data.input_shape)), out=out, rounds=ROUNDS,
        partition=[parts[index] for index in range(len(names))], training=make_training(config, data), workers=0,
        progress=False, **options,
    )  # fmt: skip
    return out


def test_three_budgets_a_killed_server_and_the_bits_of_the_local_engine(fleet: Loopback, tmp_path: Path) -> None:
    devices = [
        fleet.device(device(fleet.folder, name, index, budget, models=[SMALL["model"]]))
        for index, (name, budget) in enumerate(BUDGETS.items())
    ]
    out = tmp_path / "fleet"
    first = fleet.run(RunSettings(SMALL, str(out), minimum=3))
    fleet.until(first, lambda: (out / "metrics.jsonl").exists() and records(out))
    end(fleet.processes[0], signal.SIGKILL)  # the SuperLink; the server app ends with it
    wait_for(lambda: is_unlocked(out), "the end of the server app")
    assert not (out / "summary.json").exists()
    fleet.link()
    fleet.finished(fleet.run(RunSettings(SMALL, str(out), minimum=3, resume=True)))

    local = locally(BUDGETS, tmp_path / "local")
    assert records(out) == records(local)
    assert (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
    assert not any(record["dropped"] for record in records(out))

    summed = tmp_path / "summed"  # the same devices once more, and the server sees the sum of their updates only
    request = {**SMALL, "budgets": [nets.BUDGETS[0]], "rounds": 1}
    fleet.finished(fleet.run(RunSettings(request, str(summed), minimum=3, secure_aggregation=True)))
    (record,) = records(summed)
    assert sorted(record["devices"]) == [0, 1, 2] and not record["dropped"] and 1 < record["train_loss"] < 4
    assert not list(fleet.folder.glob("*/cache/secure_sum.json"))
    for process in devices:
        end(process, signal.SIGTERM)


def is_unlocked(out: Path) -> bool:
    with open(out / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


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
