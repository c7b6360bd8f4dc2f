"""The thread that starts the apps outlives whatever goes wrong with one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from strata.fleet import app_processes
from strata.fleet.app_processes import AppStarter, StartedApps, new_secret
from tests.fleet.loopback import wait_for


class Enough(BaseException):
    pass


class Tasks:
    """One after the other, and then an end."""

    def __init__(self, count: int) -> None:
        self.left = count

    def AcquireTask(self, request: Any) -> AcquireTaskResponse:
        if self.left == 0:
            raise Enough
        self.left -= 1
        return AcquireTaskResponse(task=Task(), token="secret")


def test_a_task_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    class Process:
        tries = 0

        def __init__(self, command: list[str], umask: int, **rest: Any) -> None:
            Process.tries += 1
            if Process.tries < 3:
                raise OSError(12, "Cannot allocate memory")
            assert Path(command[command.index("--token-file") + 1]).read_text() == "secret"
            started.append(umask)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(app_processes, "POLL", 0.0)
    monkeypatch.setattr(app_processes, "IDLE", 0.0)
    monkeypatch.setattr(app_processes, "AWAY", 0.0)
    executor = AppStarter(
        "127.0.0.1:1", new_secret(tmp_path), None, StartedApps("flwr-clientapp", tmp_path, umask=0o027)
    )
    with pytest.raises(Enough):
        executor._work(Tasks(4))
    assert started == [0o027, 0o027]
    assert capsys.readouterr().out.count("flwr-clientapp was not started: OSError: [Errno 12]") == 1  # said once
    assert [path.name for path in tmp_path.iterdir()] == ["executor.secret"]  # no token is left behind


def test_without_its_secret_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AppStarter("127.0.0.1:1", tmp_path / "gone", None, StartedApps("flwr-clientapp", tmp_path)).start()


def test_word_of_a_task_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any word it would look again in an hour."""
    for name in ("POLL", "IDLE"):
        monkeypatch.setattr(app_processes, name, 3600.0)
    starter = AppStarter("127.0.0.1:1", new_secret(tmp_path), None, StartedApps("none", tmp_path))

    class Client(Tasks):
        def AcquireTask(self, request: Any) -> AcquireTaskResponse:
            assert list(request.supported_task_types) == ["none"]
            starter.told()
            return super().AcquireTask(request)

    monkeypatch.setattr(StartedApps, "start", lambda *_: None)
    client = Client(3)
    with pytest.raises(Enough):
        starter._work(client)
    assert client.left == 0


WARM = """
import os, sys
from pathlib import Path
import flwr.supernode.cli
from strata.fleet.app_processes import StartedApps
from strata.fleet.device.warm_apps import WarmApps

def app():
    Path(sys.argv[-1]).write_text(f"{os.getpid()} {os.getppid()} {' '.join(sys.argv)}")

class Otherwise(StartedApps):
    def start(self, arguments, token):
        Path("otherwise").write_text(token)

flwr.supernode.cli.flwr_clientapp = app
apps = WarmApps(Otherwise("flwr-clientapp", Path()))
print("ready", flush=True)
for line in sys.stdin:
    apps.start(line.split(), "secret")
    print("done", flush=True)
"""


def test_apps_are_forked_from_a_warm_process_and_started_anew_where_it_is_gone(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(app_processes.__file__).parents[2]), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", WARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env
    )
    assert process.stdin is not None and process.stdout is not None
    said = iter(process.stdout)
    assert next(said) == "ready\n"
    (warm,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

    def start() -> None:
        assert process.stdin is not None
        process.stdin.write("--insecure\n")
        process.stdin.flush()
        assert next(said) == "done\n"

    start()
    written = tmp_path / warm  # its last argument, and so its name here, is the process that watches over it
    wait_for(lambda: written.exists() and written.read_text(), "the app")
    pid, parent, *arguments = written.read_text().split()
    assert parent == warm and pid not in (warm, str(process.pid))
    assert arguments == ["flwr-clientapp", "--insecure", "--token", "secret", "--parent-pid", warm]

    os.kill(int(warm), signal.SIGKILL)
    start()
    assert (tmp_path / "otherwise").read_text() == "secret"
    process.stdin.close()
    assert process.wait(60) == 0
