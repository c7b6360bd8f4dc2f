"""Whole runs over devices in this process: how they begin, stop and go on."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.cli import main
from strata.cli.fleet import add_parser
from strata.core.errors import BadInput, Infeasible
from strata.core.flags import given
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.settings import RunSettings
from strata.fleet.server import run as fleet_run
from strata.fleet.server.resuming import config_of
from strata.fleet.server.run import run_on_fleet
from strata.fleet.server.submission import run_settings
from strata.runs.config import RunConfig
from strata.runs.running import _most_counted
from tests.fleet.inprocess import MIB, Answering, Grid, device, prepared

pytestmark = pytest.mark.usefixtures("identity")

REQUEST: dict[str, Any] = {
    "model": "resnet20", "method": "fedrolex", "constraints": [0.25, 0.125], "rounds": 2, "per_round": 10, "batch": 8,
}  # fmt: skip


def stopping(made: PreparedDevice, rounds: int) -> Answering:
    """Ctrl-C while this device is at work in a round."""

    def answer(data: bytes) -> bytes:
        packet = codec.decode(data)
        if packet.meta["what"] == "train" and packet.meta["round"] == rounds:
            raise KeyboardInterrupt
        return made.answer(packet, 1)

    return answer


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["fleet", "run", *arguments])


def settings_of(args: argparse.Namespace, local: bool) -> RunSettings:
    return run_settings(given(args, RunConfig), args, local)


def test_a_resumed_run_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    """Those that were adjusted to the fleet may be repeated as they were given; those that are left out are kept."""
    out = tmp_path / "run"
    devices = {7: prepared(tmp_path, "a", 0, hold_out=0.4), 8: prepared(tmp_path, "b", 1, hold_out=0.4)}
    honest: dict[int, Answering] = {node: device(made) for node, made in devices.items()}
    first = RunSettings(REQUEST, str(out), minimum=2, wait=30.0, deadline=90.0, evaluation="devices")
    with pytest.raises(KeyboardInterrupt):
        run_on_fleet(Grid({7: honest[7], 8: stopping(devices[8], 1)}), first)  # type: ignore[arg-type]
    kept = json.loads((out / "fleet.json").read_text())
    assert {name: kept[name] for name in ("minimum", "wait", "deadline", "evaluation")} == {
        "minimum": 2, "wait": 30.0, "deadline": 90.0, "evaluation": "devices"}  # fmt: skip

    words = ("--out", str(out), "--resume")
    again = settings_of(asked(*words, "--constraint", "0.25,0.125", "--per-round", "10", "--wait", "0.3"), local=True)
    assert (again.minimum, again.wait, again.deadline, again.evaluation) == (None, 0.3, None, None)
    with pytest.raises(BadInput, match=r"1 of 2 devices were there after 0.3 s \(a\)"):
        run_on_fleet(Grid({7: honest[7]}), again)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="this run is evaluated by the devices"):
        run_on_fleet(Grid(honest), RunSettings({}, str(out), resume=True, evaluation="server"))  # type: ignore[arg-type]
    for other in (["--constraint", "0.5"], ["--per-round", "1"], ["--rounds", "3"]):
        with pytest.raises(BadInput, match="was started with other settings"):
            settings_of(asked(*words, *other), local=True)

    for text, lacks in (("[]", "holds no JSON object"), ('{"names": []}', "has no samples, evaluation")):
        (out / "fleet.json").write_text(text)
        with pytest.raises(BadInput, match=f"fleet.json is not as .*{lacks}"):
            run_on_fleet(Grid(honest), again)  # type: ignore[arg-type]

    for name in ("minimum", "wait", "deadline", "labels"):  # as older versions wrote it
        del kept[name]
    (out / "fleet.json").write_text(json.dumps(kept))
    finished = run_on_fleet(Grid(honest), settings_of(asked(*words), local=False))  # type: ignore[arg-type]
    assert finished is not None and len(finished.metrics) == 2
    kept = json.loads((out / "fleet.json").read_text())
    assert (kept["minimum"], kept["wait"], kept["deadline"], kept["evaluation"]) == (1, 600.0, 3600.0, "devices")
    saved = json.loads((out / "config.json").read_text())["request"]
    assert (saved["per_round"], saved["constraints"]) == (2, [0.125, 0.25])
    assert config_of(out, REQUEST) == RunConfig.from_json(saved)


def test_no_device_may_be_silent_for_ever() -> None:
    """Flower itself would wait for twelve hours. A run that began without a deadline goes on without one."""
    settings = RunSettings(REQUEST, "/runs/a")
    assert settings.terms({}).deadline == 3600 and settings.terms({"deadline": None}).deadline is None
    assert replace(settings, deadline=60.0).terms({"deadline": None}).deadline == 60


def test_with_differential_privacy_no_level_follows_from_who_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(fleet_run, "launch", lambda config, out, **named: seen.update(named, config=config))
    private = {"dp_noise": 1.0, "dp_clip": 0.5, "dp_delta": 0.1, "validation": 0.1}  # the fleet is one device
    for number, more in enumerate((private, {})):
        settings = RunSettings({**REQUEST, **more}, str(tmp_path / str(number)))
        run_on_fleet(Grid({7: device(prepared(tmp_path, "a"))}), settings)  # type: ignore[arg-type]
        made = seen["prepared"]
        assert (made.adjusted is None, made.engine._moving) == (bool(more), not more)


def test_a_device_too_small_for_anything_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(fleet_run, "launch", lambda config, out, **named: seen.update(named, config=config))
    small = prepared(tmp_path, "a")
    small.settings = replace(small.settings, budget=1)
    request = {name: value for name, value in REQUEST.items() if name != "constraints"}
    grid = Grid({7: device(small), 8: device(prepared(tmp_path, "b", 1))})
    robust = {**request, "aggregation": "median"}
    run_on_fleet(grid, RunSettings(robust, str(tmp_path / "run"), minimum=2))  # type: ignore[arg-type]
    engine = seen["prepared"].engine
    assert engine._evaluation._robust, "what devices measure for evaluation is not left to any one of them"
    assert engine.names == ["b"] and seen["config"].to_json()["budgets"] == [64 * MIB]
    del grid.nodes[8]
    with pytest.raises(Infeasible):
        run_on_fleet(grid, RunSettings(request, str(tmp_path / "other")))  # type: ignore[arg-type]


def test_a_new_run_on_real_devices_is_guarded_unless_asked_otherwise() -> None:
    plain = RunConfig.from_json(REQUEST)
    assert fleet_run.guarded(plain).updates.weight_cap == 4.0
    assert fleet_run.guarded(plain.changed(weight_cap=2.0)).updates.weight_cap == 2.0
    assert fleet_run.guarded(plain).updates.norm_factor == 5.0
    assert fleet_run.guarded(plain.changed(norm_factor=0.0)).updates.norm_factor == 0.0
    private = plain.changed(dp_noise=1.0, dp_clip=0.5)
    assert fleet_run.guarded(private).updates.norm_factor is None  # a change is clipped there
    parts = fleet_run.ReportedSamples((10, 20, 30, 2**40))
    assert _most_counted(4.0, parts) == 100 and _most_counted(None, parts) is None


def test_going_back_is_for_runs_that_are_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert RunSettings(REQUEST, "/a", resume=True, from_round=3).from_round == 3
    for wrong in ({"from_round": 3}, {"from_round": -1, "resume": True}, {"from_round": True, "resume": True}):
        with pytest.raises(BadInput, match="--from-round says after how many rounds a run is resumed"):
            RunSettings(REQUEST, "/a", **wrong)  # type: ignore[arg-type]
    assert main(["run", "--out", "/a", "--from-round", "2"]) == 2
    assert "--from-round says where a run is resumed" in capsys.readouterr().err
