"""A fleet on this machine: the processes that `strata fleet` starts, in plain text on loopback, without its commands.

The app bundle names `fleet_device:app`: each device has a module of that name, so some can be rogues.
"""

from __future__ import annotations

import hashlib
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

from flwr.common.config import parse_config_args
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from strata.core.errors import BadInput
from strata.core.processes import LAUNCHER
from strata.fleet.app_processes import new_secret
from strata.fleet.device.command import _command as device_command
from strata.fleet.device.supernode import POLL
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.fleet.security.addresses import parse_address
from strata.fleet.server.command import _command as server_command
from strata.fleet.server.control import Access, connect
from strata.fleet.server.submission import Ending, outcome
from tests.fleet.other_bundle import bundle

HONEST = "from strata.fleet.device.client_app import app\n"
REPOSITORY = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds; the machine may be loaded


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(what: Callable[[], Any], why: str, pause: float = 0.1) -> Any:
    """Looks often; the answer is awaited, not guessed."""
    until = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < until, f"{why}: not within {PATIENCE:g} s"
        time.sleep(pause)
    return found


def with_other_bundle(kind: str, command: list[str]) -> list[str]:
    """In place of `python -P -m strata.fleet...`."""
    module = command.index("-m") + 1
    return [*command[:module], "tests.fleet.other_bundle", kind, *command[module + 1 :]]


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
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
            LAUNCHER: str(os.getpid()), POLL: "1",
        }  # fmt: skip

    def start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )
        self.processes.append(process)
        return process

    def link(self) -> subprocess.Popen[bytes]:
        """The SuperLink; it starts the server app of each run, and knows its devices after a restart."""
        address = parse_address(f"127.0.0.1:{self.port}")
        command = server_command(address, None, self.folder, new_secret(self.folder / "link-home"))
        process = self.start("link", with_other_bundle("server", command), self.environment("link-home"))
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
        command = device_command(settings, parse_address(f"127.0.0.1:{self.port}"), None)
        return self.start(
            settings.name, with_other_bundle("device", command), self.environment(f"{settings.name}/home", home)
        )

    def run(self, settings: RunSettings) -> int:
        """The id of a run that was begun."""
        fab = bundle()
        config = user_config_to_proto(parse_config_args([settings.to_argument()]))
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})), override_config=config
        )
        with connect(self.access) as client:
            return int(client.StartRun(request).run_id)

    @property
    def access(self) -> Access:
        return Access.of(parse_address(f"127.0.0.1:{self.port}"), None, True)

    def ending(self, run: int) -> Ending | None:
        """How the run ended; None while it goes on, or while the SuperLink is too busy to say."""
        with suppress(BadInput), connect(self.access) as client:
            return outcome(client, run)
        return None

    def until(self, run: int, what: Callable[[], Any]) -> None:
        """Waits for something that this run brings about."""
        wait_for(lambda: what() or self.ending(run), "what the run brings about", pause=0.5)
        assert what(), f"{self.ending(run)}\n{self.logs()}"

    def finished(self, run: int) -> None:
        """Waits until the run has ended, and ended well."""
        ending = wait_for(lambda: self.ending(run), "the end of the run", pause=1.0)
        assert ending.status == "completed", f"{ending}\n{self.logs()}"

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*/cache/device.log")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self) -> None:
        for process in reversed(self.processes):
            end(process, signal.SIGTERM)
            with suppress(ProcessLookupError):  # an app that Flower left behind is still of its group
                os.killpg(process.pid, signal.SIGKILL)


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
