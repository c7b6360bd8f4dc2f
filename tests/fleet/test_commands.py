"""Wrong use of the commands: one sentence, exit code 2, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from strata.cli import main
from strata.fleet.environment import environment
from strata.fleet.security.keys import make_keys
from tests.fleet.processes import PATIENCE, Command, free_port


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    make_keys(folder, [], ["a"])
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["fleet", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("strata fleet: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.10", "::"])
def test_plain_text_server_elsewhere(capsys: pytest.CaptureFixture[str], host: str) -> None:
    assert "plain text" in refused(capsys, "server", "--insecure", "--host", host)


def test_plain_text_device_run_and_status_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there = ("--insecure", "--server", "192.168.1.10:8477")
    assert "plain text" in refused(capsys, "device", *there, "--name", "a", "--cache", tmp_path / "cache")
    assert "plain text" in refused(capsys, "run", *there, "--out", "/tmp/x")
    assert "plain text" in refused(capsys, "status", *there)
    assert list(tmp_path.iterdir()) == []


def test_no_keys_and_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--keys DIR" in refused(capsys, "server")
    assert "--keys" in refused(capsys, "device", "--server", "localhost")
    assert "--keys DIR" in refused(capsys, "run", "--out", "/tmp/x")
    assert "--keys DIR" in refused(capsys, "status")


def test_missing_key_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: Path) -> None:
    assert "there is no file" in refused(capsys, "server", "--keys", tmp_path)
    assert "there is no file" in refused(capsys, "device", "--server", "localhost", "--keys", tmp_path)
    assert "operator.token" in refused(capsys, "status", "--keys", keys / "devices" / "a")


def test_what_cannot_be_a_path_to_keys(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--keys", "x" * 300)
    assert "(File name too long)" in refused(capsys, "server", *keys)
    assert "(File name too long)" in refused(capsys, "device", "--server", "localhost", *keys)
    assert "(File name too long)" in refused(capsys, "status", *keys)


def test_keys_are_not_dropped_in_silence(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    both = ("--insecure", "--keys", keys)
    for command in (("server",), ("device", "--server", "localhost"), ("run", "--out", "/tmp/x"), ("status",)):
        assert "leave out --insecure, or --keys" in refused(capsys, *command, *both)


@pytest.mark.parametrize(
    "options, says",
    [
        (("--evaluation", "devices", "--data", "digits", "--classes", "10"), "leave out --data, --classes"),
        (("--evaluation", "devices", "--data-dir", "d", "--input", "3x32x32"), "leave out --data-dir, --input"),
        (("--levels", "2", "--budget", "24MiB"), "--levels groups the devices' own budgets"),
        (("--levels", "2", "--constraint", "0.25"), "--levels groups the devices' own budgets"),
        (("--levels", "2", "--resume"), "--levels groups the devices' own budgets"),
    ],
)
def test_options_that_a_run_would_not_look_at(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], keys: Path, tmp_path: Path
) -> None:
    assert says in refused(capsys, "run", "--keys", keys, "--out", tmp_path / "run", *options)


def test_port_in_use(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert "is in use" in refused(capsys, "server", "--keys", keys, "--host", "127.0.0.1", "--port", port)
        assert "is in use" in refused(capsys, "server", "--insecure", "--port", port)


def test_no_server(capsys: pytest.CaptureFixture[str], keys: Path, tmp_path: Path) -> None:
    where = f"localhost:{free_port()}"
    assert "no server answers" in refused(capsys, "status", "--keys", keys, "--server", where)
    assert "no server answers" in refused(capsys, "run", "--keys", keys, "--server", where, "--out", tmp_path / "run",
                                          "--constraint", "0.25")  # fmt: skip
    assert "no server answers" in refused(capsys, "device", "--keys", keys, "--name", "a", "--server", where,
                                          "--no-wait", "--cache", tmp_path / "cache")  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_values(capsys: pytest.CaptureFixture[str], keys: Path) -> None:
    device = ("device", "--server", "localhost", "--keys", keys, "--name", "a")
    assert "a number of bytes" in refused(capsys, *device, "--budget", "much")
    assert "--part is written I/N" in refused(capsys, *device, "--part", "3")
    assert "--part is written I/N" in refused(capsys, *device, "--part", "²/3")
    assert "HOST:PORT" in refused(capsys, "device", "--server", "fleet..local:8477", *device[3:])
    assert "part 0 to 3 - 1" in refused(capsys, *device, "--part", "3/3")
    assert "give --part I/N too" in refused(capsys, *device, "--partition", "iid")
    assert "hold-out" in refused(capsys, *device, "--hold-out", "1")
    assert "HOST:PORT" in refused(capsys, "server", "--keys", keys, "--port", "99999")
    remote = ("run", "--keys", keys, "--server", "192.0.2.1", "--out", "runs/a")
    assert "its whole path there" in refused(capsys, *remote)
    assert "give --out DIR" in refused(capsys, *remote[:-2])


def test_options_that_nothing_would_use(capsys: pytest.CaptureFixture[str], keys: Path, tmp_path: Path) -> None:
    asked = ("run", "--keys", keys, "--server", f"localhost:{free_port()}", "--out", tmp_path / "run", "--method", "fd")
    assert "--schedule is for the method slt, not for fd" in refused(capsys, *asked, "--schedule", "equal")
    counting = (*asked, "--accounting", "paper")
    assert "no server answers" in refused(capsys, *counting)  # of the devices' own budgets
    assert "leave it out, or give a --budget" in refused(capsys, *counting, "--constraint", "0.5")
    assert "the norm bound must be a number" in refused(capsys, *asked, "--norm-bound", "inf")
    assert "home folder" in refused(capsys, *asked, "--data-dir", "~no-such-user")


def test_folders_that_cannot_be(capsys: pytest.CaptureFixture[str], keys: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    device = ("device", "--server", "localhost", "--keys", keys, "--name", "a")
    for folder in (file, file / "x", "/proc/x"):
        assert f"cannot write to {folder} (" in refused(capsys, "keys", folder, "--devices", "1")
        assert f"cannot write to {folder} (" in refused(capsys, *device, "--cache", folder)
        there = ("--port", free_port(), "--data-dir", folder)
        assert f"cannot write to {folder} (" in refused(capsys, "server", "--insecure", *there)


def test_ctrl_c_before_the_run_has_begun(keys: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        run = Command(tmp_path, "fleet", "run", "--keys", str(keys), "--server", server, "--out", str(tmp_path / "run"))
        silent.settimeout(PATIENCE)
        with silent.accept()[0]:  # it waits for an answer now
            assert run.stop(signal.SIGINT) == 130, run.text()
    assert run.text() == "strata fleet: stopped\n"


def test_the_servers_records_are_its_owners(tmp_path: Path) -> None:
    from strata.fleet.server.command import DATABASE, _state

    said: list[str] = []
    with _state(tmp_path / "new", said.append) as new:
        assert stat.S_IMODE(new.stat().st_mode) == 0o700 and said == []
    old = tmp_path / "old"
    old.mkdir(mode=0o755)
    (old / DATABASE).touch(0o644)
    with _state(old, said.append):
        assert stat.S_IMODE((old / DATABASE).stat().st_mode) == 0o600
    assert len(said) == 1 and f"`chmod 700 {old}`" in said[0]


def test_options_of_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "run", "--dropout", "0.1"])
    assert ended.value.code == 2
    assert "--dropout is not for real fleets: it is simulated" in capsys.readouterr().err


def test_without_flower(
    capsys: pytest.CaptureFixture[str], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "flwr" else find(name, *more))
    for arguments in (
        ("keys", tmp_path / "k", "--devices", "1"),
        ("server", "--insecure", "--port", free_port()),
        ("status", "--keys", keys),
        ("device", "--server", "localhost", "--keys", keys, "--name", "a", "--cache", tmp_path / "c"),
    ):
        assert "pip install 'strata-fl[flower]'" in refused(capsys, *arguments)


@pytest.mark.parametrize("command", ["", "keys", "server", "device", "run", "status"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *command.split(), "--help"])
    assert ended.value.code == 0
    assert f"strata fleet {command}" in capsys.readouterr().out.partition("example")[2]


def test_the_processes_of_a_fleet_do_not_look_for_modules_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    made = environment(tmp_path / "home")
    assert made["PYTHONSAFEPATH"] == "1" and str(tmp_path) not in made["PYTHONPATH"].split(os.pathsep)
    assert made["PYTHONPATH"].startswith("/mine")
