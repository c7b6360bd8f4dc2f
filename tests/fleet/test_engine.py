"""The engine against devices in this process: a Grid of functions, with real devices behind some of them."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app.error import Error

from strata.core.errors import BadInput
from strata.core.settings import settings_of
from strata.data import load
from strata.data.objectives import Classification
from strata.engines import Outcome
from strata.execution import Execution, memory, state_bytes
from strata.federation.checking import problem_with
from strata.federation.held_layers import Holdings
from strata.federation.jobs import EvaluateJob, FinishJob, StatisticsJob
from strata.fleet.device.own_data import label_digest
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import failure
from strata.fleet.protocol.settings import DeviceSettings
from strata.fleet.server.levels import Assignment, group, level_for, most_bytes, per_device
from strata.fleet.server.members import ConnectedDevices
from strata.fleet.server.messages import Messenger
from strata.fleet.server.run import _members
from strata.methods import Phase, create
from strata.models import resnet20
from strata.planning import plan
from strata.training import combine, train_device
from tests.fleet.inprocess import MIB, TRAINING, Grid, changed, device, fleet, graph, job, prepared, silent, state

pytestmark = pytest.mark.usefixtures("identity")


def trained(grid: Grid) -> list[codec.Packet]:
    return [packet for _, packet in grid.sent if packet.meta["what"] == "train"]


def test_frozen_layers_travel_once_and_again_when_the_device_has_lost_them(tmp_path: Path) -> None:
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    engine = fleet(grid, ["a"])
    cut = job().task.cut
    (one,) = engine.run([job(0)], state())
    assert one.reason is None and problem_with(one.result, job(0).task, state()) is None
    (two,) = engine.run([job(1)], state())
    assert two.reason is None and problem_with(two.result, job(1).task, state()) is None
    first, second = trained(grid)
    assert {entry.name for entry in first.entries} == set(cut.shapes)
    assert {entry.name for entry in second.entries} == set(cut.shapes) - cut.frozen
    # as the record counts it
    parameters = dict.fromkeys(graph().parameter_names, 4)
    sent = [sum(entry.bytes for entry in packet.entries if entry.name in parameters) for packet in (first, second)]
    held = Holdings().after(0, {0: cut}, cut.trained)
    assert sent == [Holdings().download_bytes(0, cut, parameters), held.download_bytes(0, cut, parameters)]

    (tmp_path / "a" / "frozen.bin").unlink()
    (three,) = engine.run([job(2)], state())
    assert three.reason is None
    asked, again = trained(grid)[2:]
    assert {entry.name for entry in asked.entries} == set(cut.shapes) - cut.frozen
    assert {entry.name for entry in again.entries} == set(cut.shapes)


def test_a_changed_frozen_layer_is_sent(tmp_path: Path) -> None:
    """Another level may still train it."""
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    engine = fleet(grid, ["a"])
    list(engine.run([job(0)], state()))
    name = next(name for name in job().task.cut.shapes if name in job().task.cut.frozen)
    changed = {**state(), name: state()[name] + 1}
    (after,) = engine.run([job(1)], changed)
    assert after.reason is None
    sent = {entry.name for entry in trained(grid)[1].entries}
    assert sent & job().task.cut.frozen == {name}


def test_a_phase_is_executed_as_it_says(tmp_path: Path) -> None:
    """A lean step has an execution of its own; the device is sent that, and trains by it."""
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    engine = fleet(grid, ["a"])
    plain = job(0)
    own = replace(Execution(**{name: engine.training[name] for name in settings_of(Execution)}), micro_batch=2)
    task = replace(plain.task, phases=(Phase(plain.task.cut, own),))
    (found,) = engine.run([replace(plain, task=task)], state())
    assert found.reason is None
    assert trained(grid)[0].meta["training"] == {**engine.training, "micro_batch": 2}


def test_late_busy_gone(tmp_path: Path) -> None:
    good = prepared(tmp_path, "a")
    grid = Grid({7: silent(good), 8: device(prepared(tmp_path, "b", 1))})
    engine = fleet(grid, ["a", "b"], deadline=0.6)
    began = time.monotonic()
    outcomes = {outcome.index: outcome for outcome in engine.run([job(0, 0), job(0, 1)], state())}
    assert outcomes[0] == Outcome(0, None, "no answer within 0.6 s") and time.monotonic() - began >= 0.6
    (one,) = engine.run([job(1, 0)], state())
    assert one == Outcome(0, None, "still busy with round 0", sent=False)
    engine.messenger._looked = float("-inf")
    del grid.nodes[7]
    (two,) = engine.run([job(2, 0)], state())
    assert two == Outcome(0, None, "not connected", sent=False)
    grid.nodes[9] = device(good)  # it has restarted
    engine._wait = 30.0
    engine.messenger._looked = float("-inf")
    (three,) = engine.run([job(3, 0)], state())
    assert three.reason is None


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"round": 4}, "sent an update of round 4"),
        ({"device": 1}, "in the name of device 1"),
        ({"cut": "0" * 16}, "another cut"),
        ({"token": "another"}, "answered another message"),
        ({"what": "device"}, "sent device in place of an update"),
        ({"samples": True}, "True samples"),
        ({"samples": None}, "None samples"),
        ({"loss": "much"}, "loss is 'much'"),
        ({"loss": None}, "loss is nan"),
        ({"peak_bytes": -1}, "peak memory"),
        ({"round": [0]}, r"round \[0\]"),
    ],
)  # fmt: skip
def test_lies_are_refused(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    grid = Grid({7: changed(prepared(tmp_path, "a"), **meta)})
    (one,) = fleet(grid, ["a"]).run([job()], state())
    reason = one.reason or problem_with(one.result, job().task, state())
    assert reason is not None
    assert re.search(said, reason), reason


def test_rubbish_errors_and_too_little_memory(tmp_path: Path) -> None:
    good = prepared(tmp_path, "a")
    reply: list[Any] = [b"rubbish"]

    def answer(data: bytes) -> Any:
        return good.answer(codec.decode(data), 1) if codec.decode(data).meta["what"] == "hello" else reply[0]

    moved = Assignment((16, 24), (1,))
    engine = fleet(Grid({7: answer}), ["a"], assignment=moved)
    (one,) = engine.run([job()], state())
    assert one.reason is not None and "cannot be read" in one.reason
    reply[0] = Error(code=1, reason="client app\ncrashed")
    (two,) = engine.run([job()], state())
    assert two.reason == "no answer (client app crashed)"
    nothing = httpx.Request("POST", "http://localhost")
    reply[0] = httpx.HTTPStatusError("500", request=nothing, response=httpx.Response(500))
    (refused,) = engine.run([job()], state())
    assert refused.reason == "its answer cannot be fetched (HTTP 500)"
    reply[0] = failure("memory")
    (three,) = engine.run([job(5)], state())
    short = "out of memory: the task needs more than this device's budget"
    assert three.reason == f"{short}; moved to the level of 16 bytes" and moved.moves == [(5, 0, 0)]
    (four,) = engine.run([job(6)], state())
    assert four.reason == f"{short}; there is no smaller level for it"
    (five,) = engine.run([job(7)], state())
    assert five.reason == "has too little memory for any level"


def test_devices_evaluate_and_their_counts_are_summed(tmp_path: Path) -> None:
    devices = [prepared(tmp_path, name, index, hold_out=0.4) for index, name in enumerate("ab")]
    grid = Grid({7 + index: device(made) for index, made in enumerate(devices)})
    engine = fleet(grid, ["a", "b"])
    cut = graph().full()
    (one,) = engine.run([EvaluateJob(cut, 1, "test", "re-estimated", (0,), 0)], state())
    assert one.reason is None
    found = combine(one.result, "re-estimated", Classification())
    held = [made.own_data.held for made in devices]
    labels = torch.cat([part.labels for part in held if part is not None])
    counts = found.sums["counts"]
    assert counts == tuple(torch.bincount(labels, minlength=10).tolist()) and sum(counts) == 20
    (two,) = engine.run([FinishJob(cut, 0)], state())
    model = resnet20(num_classes=10)
    model.load_state_dict(two.result)
    images = torch.cat([part.images for part in held if part is not None])
    with torch.inference_mode():
        right = (model.eval()(*TRAINING.prepared((images,))).argmax(1) == labels).sum().item()
    assert abs(right - sum(found.sums["correct"])) <= 1
    # measured once for both: the state is the same
    assert [packet.meta["what"] for _, packet in grid.sent if packet.meta["what"] == "statistics"] == ["statistics"] * 2
    # and as they are fixed for training: the same ones, or, where some are fixed already, those behind these
    (three,) = engine.run([StatisticsJob(cut, 0)], state())
    assert all(torch.equal(three.result[name], two.result[name]) for name in graph().buffer_names)
    first, second = (norm.mean for norm in graph().batch_norms[:2])
    (four,) = engine.run([StatisticsJob(cut, 0, fixed=(first,))], state())
    assert torch.equal(four.result[first], state()[first])
    assert not torch.equal(four.result[second], three.result[second])


def test_a_name_belongs_to_one_node_until_that_is_gone(tmp_path: Path) -> None:
    said: list[str] = []
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    messenger = Messenger(grid)  # type: ignore[arg-type]
    connected = ConnectedDevices(messenger, "resnet20", said.append)
    connected.gather(1, 30.0)
    grid.nodes[8] = device(prepared(tmp_path, "a"))
    connected.gather(1, 30.0)
    assert connected.devices["a"].node == 7 and "another device named a" in said[-1]
    del grid.nodes[7]
    connected.gather(1, 30.0)
    assert connected.devices["a"].node == 8


def test_a_device_that_numbers_its_classes_otherwise_is_not_used(tmp_path: Path) -> None:
    """Same network, same number of classes: nothing else would tell that its cats are the others' dogs."""
    same, other = prepared(tmp_path, "a"), prepared(tmp_path, "b")
    other = replace(other, own_data=replace(other.own_data, labels=label_digest(("one", "zero"))))
    unnamed = replace(prepared(tmp_path, "c"), own_data=replace(other.own_data, labels=label_digest(())))
    said: list[str] = []
    grid = Grid({7: device(same), 8: device(other), 9: device(unnamed)})
    connected = ConnectedDevices(Messenger(grid), "resnet20", said.append)  # type: ignore[arg-type]
    connected.gather(3, 30.0)
    connected.structure, connected.labels = graph().hash, label_digest(load("digits").class_names)
    assert [found.name for found in _members(connected, None, said.append)] == ["a", "c"]
    assert said[-1].startswith("not used: b numbers its classes otherwise than the server")
    with pytest.raises(BadInput, match="no device can take part: b numbers"):
        _members(connected, ["b"], said.append)
    grid.nodes[10] = device(replace(other, settings=replace(other.settings, name="late")))
    connected.gather(3, 30.0)
    assert "late" not in connected.devices and "late numbers its classes otherwise" in said[-1]


def test_a_device_is_told_no_more_than_its_task_needs(tmp_path: Path) -> None:
    """Seeds of its own, and neither the run's, nor bounds, nor folders."""
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    secret = replace(job(), seed=123456789)
    list(fleet(grid, ["a"]).run([secret], state()))
    (task,) = [packet.meta for _, packet in grid.sent if packet.meta["what"] == "train"]
    needed = {"what", "model", "token", "round", "device", "lr", "seeds", "training", "cut", "levels", "frozen"}
    assert set(task) == {*needed, "deadline"} and "123456789" not in str(task)
    list(fleet(grid, ["a"]).run([FinishJob(graph().full(), 123456789)], state()))
    (measuring,) = [packet.meta for _, packet in grid.sent if packet.meta["what"] == "statistics"]
    assert "123456789" not in str(measuring)


def test_too_few_devices_is_said_with_the_reason(tmp_path: Path) -> None:
    grid = Grid({7: lambda data: failure("model")})
    connected = ConnectedDevices(Messenger(grid), "resnet20", lambda text: None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"0 of 1 devices were there after 0.3 s \(none\); not used: it is not told"):
        connected.gather(1, 0.3)


@pytest.mark.parametrize(("training", "images"), [({}, 2), ({"micro_batch": 1}, 1), ({"batch_size": 1}, 1)])
def test_warming_up_takes_no_more_images_at_once_than_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, int], images: int
) -> None:
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    engine = fleet(grid, ["a"])
    engine.training |= training
    seen: list[int] = []

    def counting(workspace: Any, task: Any, tensors: Any, own: Any, *rest: Any, **more: Any) -> Any:
        seen.append(len(own))
        return train_device(workspace, task, tensors, own, *rest, **more)

    monkeypatch.setattr("strata.fleet.device.work.train_device", counting)
    (one,) = engine.run([job()], state())
    assert one.reason is None and problem_with(one.result, job().task, state()) is None
    assert seen == [images, 25]


def test_only_agreed_models_are_built() -> None:
    with pytest.raises(BadInput, match="not told to build 'os:abort'"):
        PreparedDevice.of("os:abort", DeviceSettings("a"))


def test_levels() -> None:
    assert group([30, 10, 20, 10], 4) == [10, 20, 30]
    assert group([1, 2, 3, 4, 5, 6], 2) == [1, 4] and group([5, 9], 1) == [5]
    assert [level_for(budget, [10, 20, 30]) for budget in (9, 10, 19, 30, 99)] == [None, 0, 0, 2, 2]
    moves = Assignment((10, 20, 30), (2, 0))
    assert moves.at(3) == (2, 0)
    assert moves.move_down(0, 3) == 1 and moves.at(3) == (1, 0)
    assert moves.move_down(1, 4) == -1 and moves.at(4) == (1, 0)  # keeps its cut, and gets no task
    again = Assignment.from_json(moves.to_json())
    assert again.at(4) == (1, 0) and again.moves == [(3, 0, 1)]  # round 4 is done again, and its move with it


def test_bytes_of_a_level_are_those_of_what_is_trained() -> None:
    rolex = create("fedrolex", graph(), constraints=(0.25, 0.5))
    for way in (Execution(32), Execution(32, 8), Execution(32, proximal=0.1)):
        assert most_bytes(rolex, way) == [memory(graph(), graph().prefix(scale), way).total for scale in (0.25, 0.5)]
    fjord = create("fjord", graph(), constraints=(0.25, 0.5))  # keeps the smaller network beside the larger
    small, large = most_bytes(rolex, Execution(32))
    assert most_bytes(fjord, Execution(32)) == [small, large + state_bytes(graph(), graph().prefix(0.25))]
    slt = create("slt", graph(), plan=plan(graph(), (3, 32, 32), 32, constraint=0.125, rounds=6))
    assert most_bytes(slt, Execution(32)) == [11_078_068]  # as measured in the runs under results/
    budgets = [16 * MIB, 24 * MIB]  # a plan by true bytes keeps within them, the stronger level above the weaker
    weak, strong = most_bytes(
        create("slt", graph(), plan=plan(graph(), (3, 32, 32), 32, budget=budgets, rounds=6)), Execution()
    )
    assert weak <= budgets[0] < strong <= budgets[1]


def test_every_device_its_level() -> None:
    budgets = [16 * MIB, 24 * MIB]
    slt = create("slt", graph(), plan=plan(graph(), (3, 32, 32), 32, budget=budgets, rounds=6))
    mixed = per_device(slt, slt, [1, 1, 0])
    other = create("slt", graph(), plan=plan(graph(), (3, 32, 32), 32, budget=[24 * MIB, 24 * MIB, 16 * MIB], rounds=6))
    assert [mixed.cut_for(3, device) for device in range(3)] == [other.cut_for(3, device) for device in range(3)]
    rolex = create("fedrolex", graph(), constraints=(0.25, 0.5))
    assert per_device(rolex, rolex, [1, 0, 1]).constraints == (0.5, 0.25, 0.5)  # type: ignore[attr-defined]
