"""The whole thing with the real commands: keys, a TLS server, three devices with different memory, a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from strata.cli import main
from strata.fleet.security.addresses import parse_address
from strata.fleet.security.audit import read_log
from strata.fleet.security.keys import KeyFolder
from strata.fleet.security.tokens import make_token
from strata.fleet.server.control import Access
from strata.fleet.server.status import FleetState, look
from tests.fleet import nets
from tests.fleet.link import Link, Unavailable
from tests.fleet.nets import BUDGETS
from tests.fleet.processes import PATIENCE, STRATA, Command, alive, descendants, free_port, strata, wait_until_gone

RUN = ("--model", "nets:small", "--method", "slt", "--rounds", "2", "--per-round", "3", "--batch", "16", "--seed", "3")


class Fleet:
    """Device c is at the other end of a slow, lossy link, where this machine can make one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices: list[Command] = []
        self.link: Link | None = None
        self.why_no_link = ""
        try:
            self.link = Link()
        except Unavailable as error:
            self.why_no_link = str(error)
        shutil.copy(nets.__file__, folder)  # the users' own network: on the devices and on the server
        self.at = ("--server", f"localhost:{free_port()}", "--keys", "keys")
        far = self.link.here if self.link else "127.0.0.1"
        made = strata("fleet", "keys", "keys", "--host", far, "--devices", "a,b,c", cwd=folder)
        assert made.returncode == 0, made.stderr
        self.serve()
        for index, name in enumerate("abc"):
            self.device(name, index, far if name == "c" and self.link is not None else "127.0.0.1")
        for device in self.devices:
            device.wait_for("is connected")

    def serve(self) -> None:
        port = self.at[1].rpartition(":")[2]
        self.server = Command(self.folder, "fleet", "server", "--keys", "keys", "--host", "0.0.0.0", "--port", port,
                              "--data-dir", "state")  # fmt: skip
        self.server.wait_for("serving at")

    def device(self, name: str, index: int, host: str) -> None:
        server = f"{host}:{self.at[1].rpartition(':')[2]}"
        self.devices.append(
            Command(self.folder, "fleet", "device", "--server", server, "--keys", "keys",
                    "--name", name, "--budget", str(BUDGETS[index]), "--model", "nets:small", "--data", "digits",
                    "--part", f"{index}/3", "--split-seed", "3", "--cache", f"cache-{name}",
                    program=(*self.link.program, *STRATA) if self.link and host == self.link.here else STRATA)
        )  # fmt: skip

    def run(self, *arguments: str) -> Command:
        return Command(self.folder, "fleet", "run", *self.at, *arguments)

    def status(self) -> FleetState:
        return look(Access.of(parse_address(self.at[1]), self.folder / "keys", insecure=False))

    def stop(self) -> None:
        running = [*self.devices, self.server]
        below = [pid for command in running if alive(command.process.pid) for pid in descendants(command.process.pid)]
        assert [command.stop() for command in running] == [0] * len(running)
        assert wait_until_gone(below) == []
        if self.link is not None:
            self.link.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
    finally:
        fleet.stop()


def without_seconds(file: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in file.read_text().splitlines()]


def test_a_fleet_trains_to_the_bits_of_the_local_engine(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fleet.run(*RUN, "--wait-for", "3", "--out", "fleet-run")
    monkeypatch.chdir(fleet.folder)
    budgets = ",".join(map(str, BUDGETS))
    local = ("--devices", "3", "--exact", "--workers", "0", "--quiet", "--out", "local-run")
    assert main(["run", *RUN, "--budget", budgets, *local]) == 0
    assert run.wait(4 * PATIENCE) == 0, run.text()
    for words in ("a is here: 500 samples, 819200 bytes for training", "round 2/2", "accuracy"):
        assert words in run.text()
    assert "INFO" not in run.text() and "\x1b" not in run.text()
    ours, theirs = fleet.folder / "fleet-run", fleet.folder / "local-run"
    assert without_seconds(ours / "metrics.jsonl") == without_seconds(theirs / "metrics.jsonl")
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    state = fleet.status()
    assert [(device.name, device.state, device.samples, device.level_bytes) for device in state.devices] == [
        (name, "online", 500, budget) for name, budget in zip("abc", BUDGETS, strict=True)
    ]
    (listed,) = state.runs
    assert (listed.state, listed.method, listed.rounds, listed.out) == ("completed", "slt", 2, str(ours))
    assert listed.received_bytes > without_seconds(ours / "metrics.jsonl")[0]["upload_bytes"]


def test_records_are_the_servers_own_and_run_folders_as_ever(fleet: Fleet) -> None:
    def mode(name: str | Path) -> int:
        return stat.S_IMODE((fleet.folder / name).stat().st_mode)

    assert mode("state") == 0o700
    assert {mode(path.relative_to(fleet.folder)) for path in (fleet.folder / "state").glob("fleet.sqlite*")} == {0o600}
    for name in ("", "metrics.jsonl", "model.safetensors"):
        assert mode(f"fleet-run/{name}") == mode(f"local-run/{name}")


def test_one_device_was_behind_a_slow_lossy_link(fleet: Fleet) -> None:
    """The run above has the right bits in spite of it; here is that the link was slow and lossy, and was used."""
    if fleet.link is None:
        pytest.skip(fleet.why_no_link)
    assert fleet.link.sent > 100 and fleet.link.lost > 0
    assert "10.213." in fleet.devices[2].text()


def test_a_run_that_fails_says_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(fleet.folder)
    waiting = ("--wait-for", "9", "--wait", "0.5")
    assert main(["fleet", "run", *fleet.at, *RUN, *waiting, "--out", "lonely", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["state"] == "failed"
    assert " of 9 devices were there after 0.5 s" in captured.err and "Traceback" not in captured.err
    assert not Path("lonely").exists()


def test_the_audit_log_says_who_began_a_run_and_how_it_ended(fleet: Fleet) -> None:
    """The two above, which Flower's record is looked through for every few seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        lines = [line.facts or {} for line in read_log(fleet.folder / "keys" / "audit")[0]]
        ended = {line["run"]: line["state"] for line in lines if line["what"] == "run ended"}
        if len(ended) >= 2 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    began = {line["run"]: line for line in lines if line["what"] == "run started"}
    assert [ended[run] for run in began] == ["completed", "failed"]
    assert [Path(line["out"]).name for line in began.values()] == ["fleet-run", "lonely"]
    assert {(line["token"], line["from"]) for line in began.values()} <= {
        ("operator", "127.0.0.1"),
        ("operator", "::1"),
    }


def test_who_may_watch_sees_the_log_of_a_run(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    make_token(KeyFolder(fleet.folder / "keys"), "ada", "watch")
    there = ["--server", fleet.at[1], "--keys", str(fleet.folder / "keys" / "operators" / "ada")]
    assert main(["fleet", "logs", fleet.status().runs[0].run, *there]) == 0
    shown = capsys.readouterr().err
    assert "round 2/2" in shown and "completed" in shown.splitlines()[-1]


def test_folders_are_checked_before_anything_is_sent(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(fleet.folder)
    runs = len(fleet.status().runs)
    Path("used").mkdir()
    Path("used/config.json").write_text("{}")
    assert main(["fleet", "run", *fleet.at, *RUN, "--out", "used"]) == 2
    assert "used already holds a run: resume it with --resume" in capsys.readouterr().err
    assert main(["fleet", "run", *fleet.at, "--out", "nowhere", "--resume"]) == 2
    assert "there is no run to resume in" in capsys.readouterr().err
    assert len(fleet.status().runs) == runs and not Path("nowhere").exists()


def test_a_killed_server_comes_back_and_the_run_goes_on_to_the_same_bits(fleet: Fleet) -> None:
    out, local = fleet.folder / "killed", fleet.folder / "local-run"
    first = fleet.run(*RUN, "--wait-for", "3", "--out", "killed")
    wait_for_round(first, out)
    below = descendants(fleet.server.process.pid)
    fleet.server.stop(signal.SIGKILL)
    assert wait_until_gone(below) == [], "the SuperLink and the server app end with it"
    assert first.wait() != 0 and not (out / "summary.json").exists()
    fleet.serve()
    second = fleet.run("--out", "killed", "--resume", "--wait-for", "3")
    assert second.wait(4 * PATIENCE) == 0, second.text()
    assert without_seconds(out / "metrics.jsonl") == without_seconds(local / "metrics.jsonl")
    assert (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()


def test_the_server_sees_the_sum_of_updates_only(fleet: Fleet) -> None:
    asked = (*RUN, "--rounds", "1", "--budget", str(BUDGETS[0]), "--secure-aggregation", "--wait-for", "3")
    run = fleet.run(*asked, "--out", "summed")
    assert run.wait(4 * PATIENCE) == 0, run.text()
    (record,) = without_seconds(fleet.folder / "summed" / "metrics.jsonl")
    assert sorted(record["devices"]) == [0, 1, 2] and not record["dropped"] and 1 < record["train_loss"] < 4
    assert not list(fleet.folder.glob("cache-*/secure_sum.json"))


def wait_for_round(run: Command, out: Path) -> None:
    deadline = time.monotonic() + 2 * PATIENCE
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.2)


def test_ctrl_c_stops_the_run_and_it_can_go_on(fleet: Fleet) -> None:
    out = fleet.folder / "stopped"
    run = fleet.run("--model", "nets:small", "--method", "fedavg", "--rounds", "500", "--per-round", "1",
                    "--batch", "16", "--budget", "1MiB", "--out", "stopped")  # fmt: skip
    wait_for_round(run, out)
    assert run.stop(signal.SIGINT) == 130, run.text()
    assert "go on with --out" in run.text() and (out / "checkpoint").is_dir()
    assert fleet.status().runs[-1].state == "stopped"
    assert {device.state for device in fleet.status().devices} == {"online"}


@pytest.mark.slow
def test_a_device_joins_a_run_and_one_leaves_it_for_good(fleet: Fleet) -> None:
    """Each round needs three. One of them stops in the middle and is shut out: the run waits, and goes on with the one
    that comes."""
    out, keys = fleet.folder / "open", ["--keys", str(fleet.folder / "keys")]
    run = fleet.run(*RUN, "--budget", str(BUDGETS[0]), "--quorum", "3", "--wait-for", "3", "--out", "open")
    run.wait_for("3 devices: a, b, c; levels of", 2 * PATIENCE)
    launcher = fleet.devices[1].process.pid
    stopped = [launcher, *descendants(launcher)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert main(["fleet", "revoke", "b", *keys]) == 0
        run.wait_for("b has left the run in round ", 2 * PATIENCE)
        assert main(["fleet", "keys", keys[1], "--devices", "d"]) == 0
        fleet.device("d", 1, "127.0.0.1")
        run.wait_for("d joins the run in round ", 2 * PATIENCE)
        assert run.wait(4 * PATIENCE) == 0, run.text()
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    found, kept = without_seconds(out / "metrics.jsonl"), json.loads((out / "fleet.json").read_text())
    assert kept["names"] == ["a", "b", "c", "d"] and [what for *_, what in kept["changes"]] == ["left", "joined"]
    assert {0, 2} <= set(found[0]["devices"]) and {0, 2, 3} <= set(found[1]["devices"])
    assert not any(entry["id"] == 3 for record in found for entry in record["dropped"])
    changes = [record["members"] for record in found if "members" in record]
    assert sum((one["left"] for one in changes), []) == [1] and sum((one["joined"] for one in changes), []) == [3]
    state = {device.name: device for device in fleet.status().devices}
    assert set(state) == {"a", "c", "d"} and state["d"].in_run and state["d"].level_bytes == BUDGETS[0]
    lines = [line.facts or {} for line in read_log(fleet.folder / "keys" / "audit")[0]]
    took = [(line["what"], line["device"]) for line in lines if line["what"].endswith(" run")]
    assert took == [("device left run", "b"), ("device joined run", "d")]
