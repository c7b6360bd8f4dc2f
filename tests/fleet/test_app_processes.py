"""The thread that starts the apps outlives whatever goes wrong with one of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from strata.fleet import app_processes
from strata.fleet.app_processes import AppStarter, StartedApps, new_secret


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
    monkeypatch.setattr(app_processes, "AWAY", 0.0)
    executor = AppStarter("127.0.0.1:1", new_secret(tmp_path), None, StartedApps("flwr-clientapp", tmp_path, umask=0o027))
    with pytest.raises(Enough):
        executor._work(Tasks(4))
    assert started == [0o027, 0o027]
    assert capsys.readouterr().out.count("flwr-clientapp was not started: OSError: [Errno 12]") == 1  # said once
    assert [path.name for path in tmp_path.iterdir()] == ["executor.secret"]  # no token is left behind


def test_without_its_secret_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AppStarter("127.0.0.1:1", tmp_path / "gone", None, StartedApps("flwr-clientapp", tmp_path)).start()
