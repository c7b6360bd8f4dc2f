"""Real processes on loopback: one server, devices with budgets of their own, some of them rogues."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from strata.cutting import ChannelGraph
from strata.data import load, parse_partition
from strata.engines.flower.settings import DeviceSettings, RunSettings
from strata.federation import run
from strata.federation.request import Request
from tests.engines.flower.loopback import Loopback, end, loopback, wait_for

MIB = 2**20
ROUNDS = 3
PARTS = 12  # of digits: 125 images each
BUDGETS = {"ant": 16 * MIB, "bee": 24 * MIB, "cat": 32 * MIB}
REQUEST = {"model": "resnet20", "method": "slt", "rounds": ROUNDS, "per_round": 3, "seed": 3, "lr": 0.1}


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
    request = Request(**REQUEST, budgets=tuple(names.values()), exact=True)
    data = load("digits")
    parts = parse_partition("iid", data, PARTS, 3)
    model = request.make_model(data)
    run(
        model, data, request.make_method(ChannelGraph(model, data.input_shape)), out=out, rounds=ROUNDS,
        partition=[parts[index] for index in range(len(names))], training=request.make_training(data), workers=0,
        progress=False, **request.run_options(),
    )  # fmt: skip
    return out


def test_three_budgets_a_killed_server_and_the_bits_of_the_local_engine(fleet: Loopback, tmp_path: Path) -> None:
    for index, (name, budget) in enumerate(BUDGETS.items()):
        fleet.device(device(fleet.folder, name, index, budget))
    out = tmp_path / "fleet"
    fleet.run(RunSettings(REQUEST, str(out), minimum=3))
    wait_for(lambda: (out / "metrics.jsonl").exists() and records(out), "the first round")
    end(fleet.processes[0], signal.SIGKILL)  # the SuperLink; the server app ends with it
    wait_for(lambda: is_unlocked(out), "the end of the server app")
    assert not (out / "summary.json").exists()
    fleet.link()
    fleet.finished(fleet.run(RunSettings(REQUEST, str(out), minimum=3, resume=True)))

    local = locally(BUDGETS, tmp_path / "local")
    assert records(out) == records(local)
    assert (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
    assert not any(record["dropped"] for record in records(out))


def is_unlocked(out: Path) -> bool:
    with open(out / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
