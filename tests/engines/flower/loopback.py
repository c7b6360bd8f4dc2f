"""A fleet on this machine: a SuperLink, SuperNodes and runs, as processes of Flower's own, in plain text on loopback.

The app bundle names `fleet_device:app`: each device has a folder with a module of that name, so that some can be rogues.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.engines.flower.settings import DeviceSettings, RunSettings

HONEST = "from strata.engines.flower.client_app import app\n"
BUNDLE = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "loopback"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "strata"
[tool.flwr.app.components]
serverapp = "strata.engines.flower.server_app:app"
clientapp = "fleet_device:app"
[tool.flwr.app.config]
strata = ""
"""
REPOSITORY = Path(__file__).parents[3]
PATIENCE = 300.0  # seconds; the machine may be loaded


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(what: Callable[[], Any], why: str, patience: float = PATIENCE) -> Any:
    """Looks often; the answer is awaited, not guessed."""
    until = time.monotonic() + patience
    while not (found := what()):
        assert time.monotonic() < until, f"{why}: not within {patience:g} s"
        time.sleep(0.1)
    return found


@dataclass
class Loopback:
    folder: Path
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, home: str, *paths: Path) -> dict[str, str]:
        scripts = Path(sys.executable).parent
        path = os.pathsep.join(map(str, [*paths, REPOSITORY]))
        return {
            **os.environ, "FLWR_HOME": str(self.folder / home), "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        self.processes.append(process)
        return process

    def link(self) -> subprocess.Popen[bytes]:
        """The SuperLink; it starts the server app of each run."""
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        process = self.start("link", command, self.environment("link-home", REPOSITORY / "tests"))
        wait_for(lambda: process.poll() is not None or self._is_up(), "the SuperLink")
        assert process.poll() is None, (self.folder / "link.log").read_text()
        return process

    def _is_up(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def device(self, settings: DeviceSettings, app: str = HONEST) -> subprocess.Popen[bytes]:
        home = self.folder / settings.name
        home.mkdir(exist_ok=True)
        (home / "fleet_device.py").write_text(app)
        command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
                   "--port", str(free_port()), "--node-config", settings.to_argument()]  # fmt: skip
        return self.start(settings.name, command, self.environment(f"{settings.name}/home", home))

    def run(self, settings: RunSettings) -> str:
        """The id of a run that was begun."""
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        (app / "pyproject.toml").write_text(BUNDLE)
        answer = self._flwr("run", str(app), "here", "-c", settings.to_argument(), "--format", "json")
        return str(answer["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        answer = self._flwr("ls", "here", "--run-id", run, "--format", "json")
        return answer["runs"][0]["status"], answer["runs"][0]["status-details"]

    def finished(self, run: str, out: Path) -> None:
        """Waits until the run has ended, and ended well. (The summary is its last file: no need to ask Flower often.)"""
        until = time.monotonic() + PATIENCE
        while not (out / "summary.json").exists():
            assert time.monotonic() < until, self.logs()
            if int(time.monotonic()) % 5 == 0:
                status, details = self.status(run)
                assert not status.startswith("finished") or status == "finished:completed", f"{details}\n{self.logs()}"
            time.sleep(0.5)

    def _flwr(self, *arguments: str) -> Any:
        home = self.folder / "user-home"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        done = subprocess.run(
            ["flwr", *arguments], env=self.environment("user-home"), capture_output=True, text=True, check=False
        )
        text = done.stdout[done.stdout.index("{") :] if "{" in done.stdout else done.stdout
        assert done.returncode == 0 and text, f"{done.stdout}\n{done.stderr}\n{self.logs()}"
        return json.loads(text)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*/cache/device.log")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self) -> None:
        for process in reversed(self.processes):
            end(process, signal.SIGTERM)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def loopback(folder: Path) -> Iterator[Loopback]:
    fleet = Loopback(folder)
    try:
        fleet.link()
        yield fleet
    finally:
        fleet.close()
