"""One device that lies, in whatever way, costs its own part in the run and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Message

from strata.core.errors import BadInput
from strata.engines.base import EngineFailed
from strata.federation.checking import problem_with
from strata.federation.jobs import EvaluateJob, FinishJob
from strata.fleet.device.work import PreparedDevice
from strata.fleet.pooled_statistics import pooled
from strata.fleet.protocol import codec
from strata.fleet.protocol.envelope import content
from strata.fleet.protocol.failures import failure
from strata.fleet.server.levels import Assignment
from strata.fleet.server.members import ConnectedDevices
from strata.fleet.server.messages import Messenger
from strata.fleet.server.run import _labels, _members, _unseen_data
from tests.fleet.inprocess import Answering, Grid, changed, device, fleet, graph, job, prepared, state

pytestmark = pytest.mark.usefixtures("identity")

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def lying(made: PreparedDevice, what: str, change: Change) -> Answering:
    """Honest but for its answers to messages of one kind: `change` writes to them, or gives another answer."""

    def answer(data: bytes) -> Any:
        packet = codec.decode(made.answer(codec.decode(data), 1))
        if codec.decode(data).meta["what"] != what:
            return codec.encode(packet.meta, packet.tensors())
        meta, tensors = dict(packet.meta), packet.tensors()
        other = change(meta, tensors)
        return codec.encode(meta, tensors) if other is None else other

    return answer


def saying(made: PreparedDevice, **meta: Any) -> Answering:
    """Of itself."""
    return lying(made, "hello", lambda said, _: said.update(meta))


def gathered(nodes: dict[int, Answering], said: list[str]) -> ConnectedDevices:
    connected = ConnectedDevices(Messenger(Grid(nodes)), "resnet20", said.append)  # type: ignore[arg-type]
    connected.gather(1, 30.0)
    return connected


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"mean": [10**400] * 3}, "OverflowError"),
        ({"samples": 2**61}, "more data than there can be"),
        ({"input": [3, 2**40, 2**40]}, "more data than there can be"),
        ({"mean": [0.5]}, "no mean and standard deviation"),
        ({"std": [0.2, 0.0, 0.2]}, "no mean and standard deviation"),
        ({"augmentation": "whirl\n\x1b[31m"}, "augmentation that is not known here, whirl [31m"),
        ({"name": ["a"]}, "no proper name"),
        ({"versions": "torch"}, "AttributeError"),
    ],
)
def test_greetings_that_lie(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    heard: list[str] = []
    connected = gathered({7: saying(prepared(tmp_path, "a"), **meta), 8: device(prepared(tmp_path, "b", 1))}, heard)
    assert list(connected.devices) == ["b"]
    (refusal,) = [text for text in heard if text.startswith("a device (node 7) is not used")]
    assert said in refusal and refusal.isprintable()


def test_an_answer_that_flower_cannot_unpack_is_its_devices_own(tmp_path: Path) -> None:
    """Of the three that are there at once, none of the others is lost."""
    elsewhere = Message(content(b"x"), 9, "train")
    elsewhere.metadata.__dict__["_reply_to_message_id"] = "message 0"  # not the one it was asked
    grid = Grid({
        7: lying(prepared(tmp_path, "a"), "train", lambda *_: IndexError("in a hostile object")),
        8: device(prepared(tmp_path, "b", 1)),
        9: lying(prepared(tmp_path, "c", 2), "train", lambda *_: elsewhere),
    })  # fmt: skip
    engine = fleet(grid, ["a", "b", "c"])
    found = {one.index: one for one in engine.run([job(0, number) for number in range(3)], state())}
    assert found[0].reason == "its answer cannot be read (IndexError in Flower)"
    assert found[1].reason is None and problem_with(found[1].result, job(0, 1).task, state()) is None
    assert found[2].reason == "no answer (unavailable)"  # Flower's word at the next look
    assert not engine.messenger.open


def test_a_server_that_cannot_be_reached_is_no_devices_fault(tmp_path: Path) -> None:
    grid = Grid({7: lying(prepared(tmp_path, "a"), "train", lambda *_: httpx.ConnectError("gone"))})
    with pytest.raises(httpx.ConnectError):
        list(fleet(grid, ["a"]).run([job()], state()))


def test_what_is_not_the_size_of_an_update_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def more(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["more"] = torch.zeros(1000)

    engine = fleet(Grid({7: lying(prepared(tmp_path, "a"), "train", more)}), ["a"])
    copied: list[object] = []
    monkeypatch.setattr("strata.fleet.server.engine.update_of", lambda *values: copied.append(values))
    (one,) = engine.run([job()], state())
    cut = job().task.cut
    due = 4 * sum(math.prod(cut.shapes[name]) for name in cut.trained)
    assert one.reason == f"sent {due + 4000} bytes of tensors, not {due}" and not copied


def test_what_makes_reading_fail_costs_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(meta: Any, tensors: Any) -> None:
        raise RuntimeError("torch\nsays no")

    monkeypatch.setattr("strata.fleet.server.engine.update_of", fail)
    (one,) = fleet(Grid({7: device(prepared(tmp_path, "a"))}), ["a"]).run([job()], state())
    assert one.reason == r"its answer cannot be read (RuntimeError('torch\nsays no'))"


def test_what_devices_write_of_their_failures_is_not_shown(tmp_path: Path) -> None:
    words = {"what": "failure", "kind": "failed", "reason": "no\nround 3 \x1b[2J" + "x" * 999,
             "detail": "Traceback\n2026-01-01T00:00:00 all is well\r\n\x07" + "y" * 9999}  # fmt: skip
    grid = Grid({7: lying(prepared(tmp_path, "a"), "train", lambda *_: codec.encode(words))})
    (one,) = fleet(grid, ["a"]).run([job()], state())
    assert one.reason == "its work failed: the device's own logs say why" and one.detail == ""
    words["kind"] = "no\nround 3"
    (one,) = fleet(grid, ["a"]).run([job()], state())
    assert one.reason == "it failed in a way that is not known here"


def test_a_device_that_no_longer_fits_does_not_take_a_name_over(tmp_path: Path) -> None:
    said: list[str] = []
    grid = Grid({7: device(prepared(tmp_path, "a")), 8: device(prepared(tmp_path, "a"))})
    connected = ConnectedDevices(Messenger(grid), "resnet20", said.append)  # type: ignore[arg-type]
    connected.gather(1, 30.0)
    connected.structure = "another"
    del grid.nodes[7]
    connected._messenger.nodes(now=True)
    connected.refresh()
    assert not connected.devices and "install the same version" in said[-1]


def test_a_name_is_that_of_the_key(tmp_path: Path) -> None:
    """c's key is registered, and it says that it is a, who is away."""
    said: list[str] = []
    grid = Grid({7: device(prepared(tmp_path, "a")), 8: device(prepared(tmp_path, "b", 1))})
    grid.names = {7: "c", 8: "b"}
    connected = ConnectedDevices(Messenger(grid), "resnet20", said.append)  # type: ignore[arg-type]
    connected.gather(1, 30.0)
    assert list(connected.devices) == ["b"]
    assert any("it calls itself a, and its key is that of c: start it with --name c" in text for text in said)


def test_with_differential_privacy_devices_keep_their_level(tmp_path: Path) -> None:
    grid = Grid({7: lying(prepared(tmp_path, "a"), "train", lambda *_: failure("memory"))})
    levels = Assignment((16, 24), (1,))
    (one,) = fleet(grid, ["a"], assignment=levels, moving=False).run([job()], state())
    assert one.reason is not None and one.reason.endswith("budget; it keeps its level, and contributes nothing")
    assert levels.moves == []


# --- evaluation on devices ---------------------------------------------------------------------------------------


def evaluated(grid: Grid, said: list[str]) -> Any:
    engine = fleet(grid, ["a", "b"], say=said.append)
    (one,) = engine.run([EvaluateJob(graph().full(), 1, "test", "batch", (0,), 0)], state())
    (two,) = engine.run([FinishJob(graph().full(), 0)], state())
    return one.result, two.result


def worse_variance(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    next(value for name, value in tensors.items() if name.endswith("running_var"))[0] = -1.0


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("evaluate", lambda meta, _: meta.update(loss_sum=10**400), "sent no loss"),
        ("evaluate", lambda meta, _: meta["sums"].update(counts=[2**70] * 10), "sent counts that are none"),
        ("evaluate", lambda meta, _: meta["sums"].update(correct=[11] * 10), "sent counts that do not fit"),
        ("evaluate", lambda meta, _: meta["sums"].update(counts=[0.5] * 10), "sent counts that are none"),
        ("evaluate", lambda meta, _: meta.update(sums=[]), "sent no sums"),
        ("evaluate", lambda meta, _: meta.update(what="failure", kind="late"), "stopped at its deadline"),
        ("statistics", lambda meta, _: meta.update(images=True), "sent no statistics"),
        ("statistics", worse_variance, "with negative variances"),
        ("statistics", lambda _, tensors: tensors.update(more=torch.zeros(9)), "statistics of another size"),
    ],
)
def test_surveys_go_on_without_a_liar(tmp_path: Path, what: str, change: Change, said: str) -> None:
    heard: list[str] = []
    liar = lying(prepared(tmp_path, "a", hold_out=0.4), what, change)
    units, final = evaluated(Grid({7: liar, 8: device(prepared(tmp_path, "b", 1, hold_out=0.4))}), heard)
    assert [unit.number for unit in units] == ([1] if what == "evaluate" else [0, 1])
    assert all(bool(torch.isfinite(value).all()) for value in final.values())
    (line,) = [text for text in heard if text.startswith("a takes no part in this evaluation")]
    assert said in line and line.isprintable()


def test_statistics_have_the_weight_of_the_images_a_device_can_have_used(tmp_path: Path) -> None:
    """Each has 15 images to train on; one says 2**31 - 1."""
    one, two = (prepared(tmp_path, name, index, hold_out=0.4) for index, name in enumerate("ab"))
    much = lying(one, "statistics", lambda meta, _: meta.update(images=2**31 - 1))
    _, honest = evaluated(Grid({7: device(one), 8: device(two)}), [])
    _, boasted = evaluated(Grid({7: much, 8: device(two)}), [])
    assert all(torch.equal(honest[name], boasted[name]) for name in honest)
    counters = [(1, {"n": torch.tensor(count)}) for count in (2**62, 3, 3)]
    assert pooled(counters) == {"n": torch.tensor(3)}


def test_nobody_there_to_evaluate_is_said_plainly(tmp_path: Path) -> None:
    grid = Grid({7: device(prepared(tmp_path, "a", hold_out=0.4))})
    engine = fleet(grid, ["a"])
    grid.nodes.clear()
    engine.messenger.nodes(now=True)
    with pytest.raises(EngineFailed, match="no device could evaluate the model: resume"):
        list(engine.run([EvaluateJob(graph().full(), 1, "test", "batch", (0,), 0)], state()))
    with pytest.raises(EngineFailed, match="no device could measure batch norm's statistics"):
        list(engine.run([FinishJob(graph().full(), 0)], state()))


def test_most_devices_say_what_the_data_is(tmp_path: Path) -> None:
    """Not the first by name, and not the one that says it has most."""
    names = ["pi-10", "pi-2", "a", "b"]
    one, two, three, four = (prepared(tmp_path, name, index, hold_out=0.4) for index, name in enumerate(names))
    said: list[str] = []
    nodes = {7: device(one), 8: saying(two, mean=[99.0] * 3, std=[1e-3] * 3, samples=2**40), 9: device(four),
             10: saying(three, classes=11, augmentation="cifar")}  # fmt: skip
    connected = gathered(nodes, said)
    data = _unseen_data(connected, None)
    own = one.own_data
    assert (data.classes, data.input_shape, data.augmentation) == (10, (3, 32, 32), own.augmentation)
    assert data.train.mean == tuple(round(value, 6) for value in own.mean)
    assert data.train.std == tuple(round(value, 6) for value in own.std)
    connected.structure = graph().hash
    assert [found.name for found in _members(connected, None, said.append)] == ["b", "pi-2", "pi-10"]
    assert said[-1].startswith("not used: a has other data (11 classes, images of 3x32x32, augmentation cifar) than")


def test_most_devices_say_how_classes_are_numbered(tmp_path: Path) -> None:
    made = [prepared(tmp_path, name, index) for index, name in enumerate("abc")]
    nodes = {number: saying(one, labels=labels) for number, (one, labels) in enumerate(zip(made, "zzy", strict=True))}
    assert _labels(gathered(nodes, []), None) == "z"
    with pytest.raises(BadInput, match="the devices' classes have different names, and no kind is that of most"):
        _labels(gathered({1: nodes[1], 2: nodes[2]}, []), None)
    assert _labels(gathered({1: nodes[1], 2: nodes[2]}, []), {"labels": "z"}) == "z"  # as the run began
    assert (
        _labels(gathered({1: device(replace(made[0], own_data=replace(made[0].own_data, labels="")))}, []), None) == ""
    )


def test_a_round_waits_for_as_many_as_it_needs(tmp_path: Path) -> None:
    """b is away for three looks: no attempt is used up by that."""

    class Returning(Grid):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += 1
            return [7] if 3 < self.looks < 7 else [7, 8]

    grid = Returning({7: device(prepared(tmp_path, "a")), 8: device(prepared(tmp_path, "b", 1))})
    engine = fleet(grid, ["a", "b"], wait=60.0, needed=2)
    while "b" in engine.connected.devices:
        engine.messenger.nodes(now=True)
        engine.connected.refresh()
    outcomes = list(engine.run([job(0, 0), job(0, 1)], state()))
    assert [one.reason for one in outcomes] == [None, None]
    engine._gone, engine._wait, grid.looks = {}, 0.01, 4
    engine.messenger.nodes(now=True)
    reasons = {one.index: one.reason for one in engine.run([job(1, 0), job(1, 1)], state())}
    assert reasons == {0: None, 1: "not connected"}  # it has been away for longer than one waits


def test_an_update_in_the_name_of_another_round_needs_no_tensors(tmp_path: Path) -> None:
    (one,) = fleet(Grid({7: changed(prepared(tmp_path, "a"), round=3)}), ["a"]).run([job()], state())
    assert one.result.tensors == {} and problem_with(one.result, job().task, state()) == "sent an update of round 3"
