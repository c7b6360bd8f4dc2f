"""Starts the app process of each task, in place of Flower's SuperExec.

SuperExec is a process of its own (some 90 MiB that a small device would rather train with), starts apps of any kind,
and takes work from whoever has started it without asking for proof. This is a thread of the SuperLink's or SuperNode's
process that starts Strata's app only, with a secret that no other user of the machine can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strata.core.errors import one_line
from strata.core.files import write_new

POLL = 0.25  # seconds between two looks for a task that is on its way
LOOKS = 20  # so often, after word of it
IDLE = 5.0  # seconds between two looks without any word: each costs a device some milliseconds of work
AWAY = 1.0  # seconds before asking again when there was no answer
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def new_secret(home: Path) -> Path:
    """A file with it, for --superexec-auth-secret-file."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "executor.secret"
    path.unlink(missing_ok=True)
    write_new(path, secrets.token_bytes(32))
    return path


class Apps(Protocol):
    """Processes of Flower's program for an app."""

    program: str  # flwr-serverapp or flwr-clientapp: the kind of its tasks, too

    def start(self, arguments: list[str], token: str) -> None: ...
    def tidy(self) -> None: ...


@dataclass
class StartedApps:
    """Each started anew. The token goes by a file: everybody can read a command line."""

    program: str
    folder: Path  # for the tokens, nobody else's
    umask: int = -1  # of the apps; -1: as here
    running: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, arguments: list[str], token: str) -> None:
        file = self.folder / f"{secrets.token_hex(8)}.token"
        program = Path(sysconfig.get_path("scripts")) / self.program
        command = [str(program), *arguments, "--token-file", str(file), "--parent-pid", str(os.getpid())]
        try:
            write_new(file, token.encode())
            self.running[file] = subprocess.Popen(command, stdin=subprocess.DEVNULL, umask=self.umask)
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def tidy(self) -> None:
        for file, process in list(self.running.items()):
            if process.poll() is not None:
                file.unlink(missing_ok=True)
                del self.running[file]


@dataclass
class AppStarter:
    address: str  # of the runtime interface, on this machine
    secret: Path
    authority: Path | None  # None: in plain text
    apps: Apps
    _word: threading.Event = field(default_factory=threading.Event)

    def told(self) -> None:
        """That there is a task, now or in a moment."""
        self._word.set()

    def start(self) -> None:
        # The client is made here, not in the thread: without a secret or certificate the process has to end.
        threading.Thread(target=self._work, args=(self._client(),), name="strata-app-starter", daemon=True).start()

    def _work(self, client: Any) -> None:
        """For ever. A task that cannot be started (no memory, no room on the disk) is given up, and the next one may
        do better: nobody shows its token, so after 30 s Flower tells the server that the device's app has failed, or
        ends the server's run as failed. Ending the process instead would cost a server all of its runs, and a device
        that died a minute until it is admitted again."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        said, looks = "", LOOKS
        while True:
            try:
                answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[self.apps.program]))
                if answer.HasField("task") and answer.token:
                    self._launch(answer.token)
                self.apps.tidy()
                looks = LOOKS if self._word.wait(POLL if looks else IDLE) else max(0, looks - 1)
                self._word.clear()
            except httpx.HTTPError:  # it is not up yet, or on its way down
                time.sleep(AWAY)
            except Exception as error:
                trouble = f"strata: {self.apps.program} was not started: {one_line(error, kind=True)}"
                if trouble != said:
                    with contextlib.suppress(OSError):  # the log may be on the disk that is full
                        print(trouble, flush=True)
                said = trouble
                time.sleep(AWAY)

    def _client(self) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        signing = SuperExecAuthHttpInterceptor(
            master_secret=self.secret.read_bytes(), protected_methods=frozenset({ACQUIRE})
        )
        return RuntimeHttpClient.from_server_address(
            self.address,
            self.authority is None,
            None if self.authority is None else self.authority.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="SuperExec"), signing],
        )

    def _launch(self, token: str) -> None:
        security = ["--insecure"] if self.authority is None else ["--root-certificates", str(self.authority)]
        self.apps.start(["--runtime-api-address", self.address, *security], token)
