"""Devices that join a run and leave it, in this process: who is sampled, at which level, and what is written down."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.cli.fleet import add_parser
from strata.core.errors import BadInput
from strata.core.flags import given
from strata.federation.membership import MembershipLog
from strata.federation.simulated_fleet import SimulatedFleet
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.settings import RunSettings
from strata.fleet.server import messages
from strata.fleet.server.levels import Assignment
from strata.fleet.server.roster import LevelAllowance, Roster
from strata.fleet.server.run import run_on_fleet
from strata.fleet.server.submission import run_settings
from strata.runs.config import RunConfig
from strata.runs.session import Result
from tests.fleet.inprocess import MIB, Answering, Grid, device, fleet, prepared

pytestmark = pytest.mark.usefixtures("identity")

REQUEST: dict[str, Any] = {
    "model": "resnet20", "method": "fedrolex", "constraints": [0.125, 0.25], "rounds": 6, "per_round": 2, "batch": 8,
    "eval_every": 6, "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is connected is looked up each time."""
    monkeypatch.setattr(messages, "LOOK", -1.0)
    monkeypatch.setattr(messages, "PAUSE", 0.01)


def on_round(made: PreparedDevice, happening: Callable[[int], None]) -> Answering:
    """A device; `happening` hears of the rounds that it trains in."""

    def answer(data: bytes) -> bytes:
        packet = codec.decode(data)
        if packet.meta["what"] == "train":
            happening(packet.meta["round"])
        return made.answer(packet, 1)

    return answer


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def replayed(out: Path) -> list[list[int]]:
    """Who was asked in each round, from the seed and the log of who was there; no round had a second attempt."""
    kept = json.loads((out / "fleet.json").read_text())
    seed = json.loads((out / "config.json").read_text())["settings"]["seed"]
    log = MembershipLog.from_json(len(kept["start"]), kept["changes"])
    asked = []
    for record in records(out):
        present = log.present(record["round"], 0, kept["per_round"])
        fleet = SimulatedFleet(seed, present.numbers)
        asked.append(
            fleet.sample(record["round"], 0, present.per_round, (), lambda device, who=present.members: device in who)  # type: ignore[misc]
        )
    return asked


def test_devices_join_and_leave_and_the_log_says_who_was_asked(tmp_path: Path) -> None:
    """One begins; in round 1 a small and a tiny one come, in round 3 the first is shut out. Stopped in round 4, and
    resumed: the same devices are asked."""
    out = tmp_path / "run"
    first, second, tiny = (prepared(tmp_path, name, index, hold_out=0.4) for index, name in enumerate("bca"))
    for made, budget in ((second, 3 * MIB), (tiny, 1)):
        made.settings = type(made.settings)(**{**vars(made.settings), "budget": budget})
    grid = Grid({7: device(first)})
    told: list[tuple[str, str]] = []

    def happening(round: int) -> None:
        if round == 1:
            grid.nodes[8], grid.nodes[9] = on_round(second, later), device(tiny)
        if round == 3:
            grid.nodes.pop(7)
            grid.shut_out[7] = "b"

    stop = True

    def later(round: int) -> None:
        if round == 4 and stop:
            raise KeyboardInterrupt

    grid.nodes[7] = on_round(first, happening)

    def run(**more: Any) -> Result | None:
        settings = RunSettings(REQUEST, str(out), evaluation="devices", **more)
        return run_on_fleet(grid, settings, lambda what, name, key: told.append((what, name)))  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        run()
    before = json.loads((out / "fleet.json").read_text())
    assert before["names"] == ["b", "c"] and before["start"] == [1] and before["joined"] == [0]
    assert before["changes"] == [[2, 0, 1, "joined"], [4, 0, 0, "left"]]
    assert told == [("device joined run", "c"), ("device left run", "b")]
    assert json.loads((out / "config.json").read_text())["settings"]["per_round"] == 1  # as many as there were
    stop = False
    assert run(resume=True) is not None
    kept = json.loads((out / "fleet.json").read_text())
    assert kept == before  # the round that was begun is run again as it was begun
    found = records(out)
    assert [record["devices"] for record in found] == replayed(out)
    assert [sorted(record["devices"]) for record in found] == [[0], [0], [0, 1], [0, 1], [1], [1]]
    assert [record.get("members") for record in found] == [
        None, None, {"joined": [1], "left": []}, None, {"joined": [], "left": [0]}, None]  # fmt: skip
    assert not any(record["dropped"] for record in found[:3])
    tasks = [packet.meta for node, packet in grid.sent if node == 8 and packet.meta["what"] == "train"]
    assert {task["device"] for task in tasks} == {1}
    assert not any("over_budget_bytes" in record for record in found)


def test_who_leaves_is_missed_for_a_while_and_comes_back_as_what_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    a, b = prepared(tmp_path, "a"), prepared(tmp_path, "b", 1)
    grid = Grid({7: device(a), 8: device(b)})
    names = ["a", "b"]
    assignment = Assignment((1, 2), (1, 1))
    engine = fleet(grid, names, assignment=assignment)
    roster = Roster(names, [25, 25], assignment, MembershipLog(2), per_round=5, wait=0.2, say=said.append)
    assert roster.at(0, 0, engine).per_round == 2
    del grid.nodes[8]
    assert roster.at(1, 0, engine).members == {0, 1}  # it may come back
    engine._gone["b"] -= 1.0
    assert roster.at(2, 0, engine).members == {0} and said[-1].startswith("b has left the run in round 2: it has been")
    assignment.move_down(1, 1)
    grid.nodes[9] = device(b)
    present = roster.at(3, 1, engine)
    assert present.members == {0, 1} and present.joined == (1,) and present.numbers == 2
    assert said[-1] == "b joins the run in round 3: at the level of 1 bytes, 25 samples"
    assert roster.log.to_json() == [[2, 0, 1, "left"], [3, 1, 1, "joined"]] and roster.names == ["a", "b"]
    allowed = LevelAllowance((2, 2), "peak", assignment)
    assert (allowed.of_device(0), allowed.of_device(1)) == (2, 1)
    roster.open = False
    del grid.nodes[9]
    engine.listen()
    engine._gone["b"] -= 1.0
    assert roster.at(4, 0, engine).members == {0, 1}  # fixed from now on


def test_who_came_after_the_checkpoint_comes_again() -> None:
    """Its number may be another's then, and neither its level nor a move is left to that one."""
    assignment = Assignment((1, 2), (1,), [(1, 0, 0), (5, 1, -1)], [1, 0])
    log = MembershipLog.from_json(1, [[3, 0, 1, "joined"], [5, 2, 2, "joined"]])
    roster = Roster(["a", "b", "c"], [5, 6, 7], assignment, log, 3)
    roster._go_back(5)
    assert (roster.names, roster.samples, assignment.joined) == (["a", "b"], [5, 6], [1])
    assert assignment.moves == [(1, 0, 0)] and (assignment.level(0), assignment.level(1)) == (0, 1)
    roster._go_back(2)
    assert (roster.names, roster.samples, assignment.joined) == (["a"], [5], [])


def test_a_round_waits_for_members_once(tmp_path: Path) -> None:
    """Where too few are left, for whoever comes; then it goes on with those that are there, and fails as ever."""
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    names = ["a"]
    assignment = Assignment((1,), (0,))
    engine = fleet(grid, names, assignment=assignment)
    roster = Roster(names, [25], assignment, MembershipLog(1), per_round=2, needed=2, wait=0.3, say=lambda text: None)
    assert roster.at(0, 0, engine).members == {0} and roster.at(0, 1, engine).members == {0}
    looks = 0

    def nodes() -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 3:
            grid.nodes[8] = device(prepared(tmp_path, "b", 1))
        return list(grid.nodes)

    grid.get_node_ids = nodes  # type: ignore[method-assign]
    roster.wait = 60.0
    assert roster.at(1, 0, engine).members == {0, 1} and names == ["a", "b"]


def test_with_differential_privacy_nobody_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon is counted for so many devices."""
    private = {**REQUEST, "dp_noise": 1.0, "dp_clip": 0.5, "dp_delta": 0.1, "validation": 0.1, "rounds": 1}
    grid = Grid({7: device(prepared(tmp_path, "a"))})
    asking = RunSettings(private, str(tmp_path / "asking"), members="open")
    with pytest.raises(BadInput, match="with differential privacy who takes part is fixed when the run begins"):
        run_on_fleet(grid, asking)  # type: ignore[arg-type]
    seen: dict[str, Any] = {}
    monkeypatch.setattr("strata.fleet.server.run.launch", lambda config, out, **named: seen.update(named))
    run_on_fleet(grid, RunSettings(private, str(tmp_path / "private")))  # type: ignore[arg-type]
    made = seen["prepared"]
    assert made.present is None and made.engine.connected.allowed == {"a"}
    grid.nodes[8] = device(prepared(tmp_path, "b", 1))
    made.engine.listen()
    assert set(made.engine.connected.devices) == {"a"}


def test_it_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def settings(*more: str) -> RunSettings:
        args = parser.parse_args(["fleet", "run", "--out", str(tmp_path / "run"), "--method", "fedavg", *more])
        return run_settings(given(args, RunConfig), args, local=True)

    private = ("--dp-noise", "1", "--dp-clip", "0.5", "--validation", "0.1")
    assert settings("--members", "fixed").members == "fixed" and settings(*private).members is None
    with pytest.raises(BadInput, match="because epsilon is counted for so many devices: leave out --members open"):
        settings(*private, "--members", "open")
    with pytest.raises(BadInput, match="who takes part is open or fixed, not 'some'"):
        RunSettings(REQUEST, "/runs/a", members="some")


@pytest.mark.parametrize("change", [{"samples": [1]}, {"joined": []}, {"changes": []}, {"changes": "none"}])
def test_a_record_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    saved = {"names": ["a", "b"], "samples": [1, 1], "levels": [5], "start": [0], "joined": [0], "moves": [],
             "changes": [[1, 0, 1, "joined"]]}  # fmt: skip
    assert Roster.of_file(saved, Assignment.from_json(saved), 3).per_round == 3
    saved |= change
    with pytest.raises(BadInput, match=r"fleet\.json"):
        Roster.of_file(saved, Assignment.from_json(saved), 3)
