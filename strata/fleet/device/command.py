"""`strata fleet device`: a SuperNode with this device's settings, started again when the server was away."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from strata.core.errors import BadInput
from strata.core.files import locked
from strata.core.importing import child_command
from strata.core.paths import writing_to
from strata.core.processes import Stopped, end, last_lines, start, stopped_by_signals
from strata.fleet.app_processes import new_secret
from strata.fleet.device.supernode import POLL
from strata.fleet.environment import environment
from strata.fleet.flower_patches import CONNECTED
from strata.fleet.protocol.settings import DeviceSettings
from strata.fleet.security.addresses import Address, Unreachable, free_port, need_loopback, need_server
from strata.fleet.security.keys import DeviceKeys
from strata.planning.runtime import MALLOC

DEFAULT_POLL = 1.0  # seconds between two questions for work
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between attempts; the last one repeats
# Seconds of refusals after which the key is taken to be unknown. Flower refuses a device that it takes for online, too,
# and one that was killed or lost its power is online to it for another minute.
REFUSED = 120.0
FAILURES = 5  # to start, in a row, after which it is given up
STEADY = 60.0  # seconds of connection after which the pauses start anew


def work(
    settings: DeviceSettings,
    server: Address,
    keys: DeviceKeys | None,
    *,
    say: Callable[[str], None],
    wait: bool = True,
    poll: float = DEFAULT_POLL,
) -> int:
    """Until Ctrl-C or SIGTERM (0). `wait` False: an unreachable server is an error, not a reason to wait."""
    if keys is None:
        need_loopback(server)
    authority = None if keys is None else keys.authority
    folder = settings.folder
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    env = {**environment(folder / "flower"), **MALLOC, POLL: str(poll)}  # Flower's processes hoard no memory either
    log = folder / "supernode.log"
    attempt = failures = 0
    refused_since: float | None = None
    with (
        stopped_by_signals(),
        locked(folder / "lock", f"another process is device {settings.name} already: end it, or give --cache"),
    ):
        try:
            while True:
                try:
                    need_server(server, authority)
                except Unreachable as error:
                    if not wait:
                        raise
                    if attempt == 0:
                        say(f"{error} Trying again")
                    refused_since = None
                else:
                    since = log.stat().st_size if log.exists() else 0
                    began = time.monotonic()
                    connected = _one_life(_command(settings, server, keys), env, log, since, settings.name, server, say)
                    attempt = 0 if connected and time.monotonic() - began > STEADY else attempt
                    refused = not connected and _refused(log, since)
                    failures = 0 if connected or refused else failures + 1
                    if not refused:
                        refused_since = None
                    elif refused_since is None:
                        refused_since = began
                    if refused_since is not None and (time.monotonic() - refused_since >= REFUSED or not wait):
                        raise BadInput(_unknown(settings.name, server))
                    if failures >= FAILURES:
                        raise BadInput(
                            f"the device's runtime does not start; the end of {log}:\n{last_lines(log, since=since)}"
                        )
                    say("the connection has ended; connecting again" if connected else "not admitted yet; trying again")
                time.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
                attempt += 1
        except Stopped:
            say("stopping")
            return 0


def _one_life(
    command: list[str],
    env: dict[str, str],
    log: Path,
    since: int,
    name: str,
    server: Address,
    say: Callable[[str], None],
) -> bool:
    """Runs the SuperNode until it ends; whether the server had admitted it."""
    process = start(command, env, log)
    connected = False
    try:
        while process.poll() is None:
            if not connected and _said(log, since, CONNECTED):
                connected = True
                say(f"{name} is connected to {server}; log: {log}")
            try:
                process.wait(0.5 if not connected else 5.0)
            except subprocess.TimeoutExpired:
                pass
        return connected or _said(log, since, CONNECTED)
    finally:
        end(process)


def _said(log: Path, since: int, text: str) -> bool:
    with log.open("rb") as file:
        file.seek(since)
        return text.encode() in file.read(1 << 20)


def _refused(log: Path, since: int) -> bool:
    return _said(log, since, "Failed to initialize the connection") and not _said(log, since, "SSL/TLS handshake")


def _unknown(name: str, server: Address) -> str:
    return (
        f"the server at {server} does not admit this device's key: is registered/{name}.pub in the server's key folder "
        "made together with this device.key, and is this device's clock right?"
    )


def _command(settings: DeviceSettings, server: Address, keys: DeviceKeys | None) -> list[str]:
    command = child_command(
        "strata.fleet.device.supernode",
        "--superlink",
        str(server),
        "--node-config",
        settings.to_argument(),
        "--isolation",
        "process",
        "--superexec-auth-secret-file",
        str(new_secret(settings.folder / "flower")),
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
    )
    if keys is None:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(keys.authority), "--auth-supernode-private-key", str(keys.key)]
