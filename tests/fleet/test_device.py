"""The device's working process, as the client app reaches it: limits, deadlines, restarts. No Flower here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.core.errors import BadInput
from strata.core.seeds import derive
from strata.fleet.device import available_memory as limits
from strata.fleet.device import work_socket
from strata.fleet.device.frozen_store import FrozenLayers
from strata.fleet.device.own_data import load_own_data, split
from strata.fleet.protocol import codec
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.graph import ChannelGraph, Cut
from strata.methods.base import Task
from strata.models import resnet20
from strata.planning.runtime import MALLOC
from strata.training import LocalTraining, train_device
from tests.workspaces import workspace_of

MIB = 2**20
SEEDS = [derive(5, purpose, 1, 0) for purpose in ("sample order", "augmentation", "fjord level", "dropout")]


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(network(), (3, 32, 32))


@cache
def network() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnet20(num_classes=10)


def message(what: str, cut: Cut | None = None, /, **meta: Any) -> bytes:
    said: dict[str, Any] = {"what": what, "model": "resnet20", "token": "t", **meta}
    if cut is None:
        return codec.encode(said)
    state = network().state_dict()
    frozen = {name: codec.content_digest(cut.extract_one(name, state[name])) for name in cut.frozen}
    values = {"round": 1, "device": 0, "lr": 0.1, "seeds": SEEDS, "cut": cut.to_json(), "levels": [], "frozen": frozen,
              "training": {"batch_size": 32}}  # fmt: skip
    return codec.encode({**said, **values, **meta}, cut.extract(state))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceSettings]:
    """A device with 12 MiB, whose working process ends with `owner`."""
    folder = tmp_path_factory.mktemp("device")
    yield DeviceSettings("pi", budget=12 * MIB, partition="iid", devices=30, cache=str(folder), hold_out=0.1)


@pytest.fixture(scope="module")
def owner() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def ask(settings: DeviceSettings, data: bytes, owner: int, deadline: float | None = None) -> codec.Packet:
    return codec.decode(work_socket.ask(settings, codec.decode(data).meta["model"], data, deadline, owner))


def workers(settings: DeviceSettings) -> list[int]:
    """Processes that work for this device: the one that keeps everything ready, and its children."""
    path = str(work_socket.socket_path(settings)).encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and path in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def alone(settings: DeviceSettings) -> list[int]:
    """The one that keeps everything ready, once the children of earlier messages have ended."""
    found = workers(settings)
    return found if len(found) == 1 else []


def said_in(settings: DeviceSettings) -> str:
    """The latest line of device.log, which is not sent anywhere."""
    return work_socket.log_file(settings).read_text().splitlines()[-1]


def wait_for(what: Any) -> Any:
    until = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_what_a_device_says_of_itself(settings: DeviceSettings, owner: int) -> None:
    said = ask(settings, message("hello"), owner).meta
    assert said["name"] == "pi" and said["budget"] == 12 * MIB and said["token"] == "t"
    assert (said["samples"], said["held"], said["classes"]) == (45, 5, 10)  # 1500 // 30 = 50, a tenth held out
    assert said["structure"] == graph().hash and said["holds"] == []
    assert 50 * MIB < said["baseline"] < limits.memory_limit()


def test_its_processes_give_freed_memory_back(settings: DeviceSettings, owner: int) -> None:
    """With glibc's defaults they hold up to 2.7 times what their tensors take (docs/memory.md)."""
    ask(settings, message("hello"), owner)
    for pid in workers(settings):
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert all(f"{name}={value}".encode() in given for name, value in MALLOC.items())


def test_training_gives_the_bits_of_train_device(settings: DeviceSettings, owner: int) -> None:
    cut = graph().slt(4, 5, 0.1)
    packet = ask(settings, message("train", cut), owner)
    own, threads = load_own_data(settings), torch.get_num_threads()
    torch.set_num_threads(1)  # as everywhere where devices train
    try:
        tensors = cut.extract(network().state_dict())
        expected = train_device(workspace_of(graph()), Task(1, 0, cut), tensors, own.train, LocalTraining(), 0.1, 5)
    finally:
        torch.set_num_threads(threads)
    made = packet.tensors()
    assert packet.meta["what"] == "update" and packet.meta["cut"] == cut.hash
    assert packet.meta["loss"] == expected.loss and packet.meta["peak_bytes"] == expected.peak_bytes
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.tensors.items())
    assert sorted(packet.meta["holds"]) == FrozenLayers(settings.folder).digests() and len(packet.meta["holds"]) > 0


def test_over_the_budget_is_said_at_once_and_the_next_task_is_done(settings: DeviceSettings, owner: int) -> None:
    """The whole network needs 51 MiB at batch 32; the limit is at 12, and 24 for what no tensor accounts for. Half of
    it needs 12.9 at batch 16, which the kernel lets pass: its tensors are measured, and are too many."""
    ask(settings, message("hello"), owner)
    (first_process,) = wait_for(lambda: alone(settings))
    packet = ask(settings, message("train", graph().full()), owner)
    assert packet.meta["kind"] == "memory"
    packet = ask(settings, message("train", graph().prefix(0.5), training={"batch_size": 16}), owner)
    assert packet.meta["kind"] == "memory" and "the task's tensors take 12.90 MiB, more than" in said_in(settings)
    assert ask(settings, message("train", graph().slt(4, 5, 0.1)), owner).meta["what"] == "update"
    assert wait_for(lambda: alone(settings)) == [first_process]  # the same process, and no other


def test_the_deadline_ends_the_work(settings: DeviceSettings, owner: int) -> None:
    data = message("train", graph().slt(4, 5, 0.1), training={"batch_size": 32, "epochs": 100_000})
    packet = ask(settings, data, owner, deadline=1.0)
    assert packet.meta["kind"] == "late"
    wait_for(lambda: len(workers(settings)) == 1)


def test_a_client_app_that_is_gone_takes_its_task_along(settings: DeviceSettings, owner: int) -> None:
    data = message("train", graph().slt(4, 5, 0.1), training={"batch_size": 32, "epochs": 100_000})
    with work_socket.connection(settings, owner) as link:
        note = {"model": "resnet20", "settings": asdict(settings), "deadline": None, "client": os.getpid()}
        work_socket.send(link, json.dumps(note).encode())
        work_socket.send(link, data)
        wait_for(lambda: len(workers(settings)) == 2)
    wait_for(lambda: len(workers(settings)) == 1)


def test_a_killed_task_is_reported(settings: DeviceSettings, owner: int) -> None:
    data = message("train", graph().slt(4, 5, 0.1), training={"batch_size": 32, "epochs": 100_000})
    (parent,) = wait_for(lambda: alone(settings))
    answers: list[codec.Packet] = []
    thread = threading.Thread(target=lambda: answers.append(ask(settings, data, owner)))
    thread.start()
    child = wait_for(lambda: [pid for pid in workers(settings) if pid != parent])[0]
    os.kill(child, signal.SIGKILL)  # as the kernel does when memory is short
    thread.join(120)
    assert answers[0].meta["kind"] == "memory" and "ended by SIGKILL" in said_in(settings)


def test_nonsense_is_refused(settings: DeviceSettings, owner: int) -> None:
    cut = graph().slt(4, 5, 0.1)
    assert ask(settings, message("dance"), owner).meta["kind"] == "refused"
    assert "asks for 'dance'" in said_in(settings)
    for meta, said in (
        ({"cut": replace(cut, graph_hash="another").to_json()}, "install the same version"),
        ({"training": {"optimizer": "os:abort"}}, "another version"),
        ({"training": {"batch_size": 0}}, "at least 1"),
        ({"frozen": {"fc.weight": "0" * 32}}, "does not freeze"),
        ({"cut": graph().full().to_json(), "frozen": {}}, "fit"),
    ):
        packet = ask(settings, message("train", cut, **meta), owner)
        assert packet.meta["kind"] == "refused" and said in said_in(settings), packet.meta
    packet = ask(settings, message("hello", model="os:abort"), owner)
    assert packet.meta["kind"] == "model" and "not told to build 'os:abort'" in said_in(settings)


def test_another_model_gets_another_process_which_ends_with_its_owner(settings: DeviceSettings) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = replace(settings, budget=13 * MIB)
        assert ask(other, message("hello"), process.pid).meta["budget"] == 13 * MIB
        wait_for(lambda: len(workers(settings)) == 1)  # the other one is ending
        process.kill()
    wait_for(lambda: not workers(settings))
    assert not work_socket.socket_path(settings).exists()


def test_hold_out_by_hand() -> None:
    own = np.array([3, 5, 8, 9, 20])
    kept, held = split(own, 0.4, seed=1)
    assert len(held) == 2 and sorted([*kept, *held]) == list(own) and list(kept) == sorted(kept)
    assert [len(part) for part in split(own, 0.01, 1)] == [4, 1] and [len(part) for part in split(own, 0.99, 1)] == [
        1,
        4,
    ]
    assert split(own, 0.0, 1)[1].size == 0


def test_limits_of_cgroups(tmp_path: Path) -> None:
    group = tmp_path / "user" / "job"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/user/job\n")
    (group / "memory.max").write_text("max\n")
    (tmp_path / "user" / "memory.max").write_text(f"{64 * MIB}\n")
    assert limits.memory_limit(tmp_path, membership) == 64 * MIB
    (group / "memory.max").write_text(f"{48 * MIB}\n")
    assert limits.memory_limit(tmp_path, membership) == 48 * MIB
    old = tmp_path / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{32 * MIB}\n")
    membership.write_text("4:cpu,memory:/job\n2:pids:/job\n")
    assert limits.memory_limit(tmp_path, membership) == 32 * MIB


def test_what_is_left(tmp_path: Path) -> None:
    """64 MiB, of which 40 are in use, but 8 of these hold files that can be read again: 32 are left."""
    membership, meminfo = tmp_path / "membership", tmp_path / "meminfo"
    membership.write_text("0::/job\n")
    meminfo.write_text(f"MemTotal: {999 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {50 * 1024} kB\n")
    assert limits.memory_left(tmp_path, membership, meminfo) == 50 * MIB
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "job" / "memory.current").write_text(f"{40 * MIB}\n")
    (tmp_path / "job" / "memory.stat").write_text(f"anon {32 * MIB}\ninactive_file {8 * MIB}\nactive_file 0\n")
    assert limits.memory_left(tmp_path, membership, meminfo) == 32 * MIB
    meminfo.write_text(f"MemAvailable: {20 * 1024} kB\n")
    assert limits.memory_left(tmp_path, membership, meminfo) == 20 * MIB
    assert limits.memory_left(tmp_path / "none", tmp_path / "none", tmp_path / "none") == limits.memory_limit()
    assert limits.budget_left(100 * MIB + 5, 40 * MIB, 80 * MIB) == 60 * MIB
    assert limits.budget_left(100 * MIB, 40 * MIB, 20 * MIB + 5) == 20 * MIB and limits.budget_left(1, 2, 3) == MIB


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "../x"}, "name"),
        ({"name": "a", "budget": 0}, "budget"),
        ({"name": "a", "index": 3, "devices": 3}, "part"),
        ({"name": "a", "hold_out": 1.0}, "Hold|hold"),
        ({"name": "a", "deadline": 0}, "deadline"),
    ],
)
def test_settings_of_a_device(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        DeviceSettings(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"out": "runs/a"}, "absolute"),
        ({"minimum": 0}, "at least 1 device"),
        ({"evaluation": "both"}, "evaluation"),
        ({"deadline": float("inf")}, "deadline"),
        ({"levels": 0}, "level"),
    ],
)
def test_settings_of_a_run(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        RunSettings(**{"request": {}, "out": "/runs/a", **values})


def test_settings_travel_through_flower() -> None:
    from flwr.common.config import parse_config_args

    device = DeviceSettings("pi-1", data_dir='/a b/it\'s="x"', models=("pkg.nets:make",))
    assert DeviceSettings.from_config(parse_config_args([device.to_argument()])) == device
    run = RunSettings({"model": "resnet20", "constraints": [0.5]}, "/runs/a 'b'", deadline=3.5)
    assert RunSettings.from_config(parse_config_args([run.to_argument()])) == run
    for config, said in (({}, "no Strata settings"), ({"strata": "{"}, "not JSON"), ({"strata": '{"x": 1}'}, "with x")):
        with pytest.raises(BadInput, match=said):
            DeviceSettings.from_config(config)
