"""`strata fleet server`: a SuperLink behind TLS and the guard, with the registered devices and no others."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strata.errors import BadInput
from strata.fleet.addresses import Address, Unreachable, need_free, need_loopback, need_server
from strata.fleet.children import Signals, Stopped, end, last_lines, locked, start, wait_until
from strata.fleet.control import Access, connect
from strata.fleet.environment import environment, python
from strata.fleet.executing import new_secret
from strata.fleet.keys import KeyFolder
from strata.fleet.superlink import TOKEN

START = 120.0  # seconds for the server to answer
LOOK = 2.0  # seconds between looks at the registered keys
SOON = 30  # days


def serve(
    address: Address, keys: Path | None, *, insecure: bool, data_dir: Path | None, say: Callable[[str], None]
) -> int:
    """Until Ctrl-C or SIGTERM (0), or until the server's process fails (1)."""
    if insecure:
        need_loopback(address)
    elif keys is None:
        raise BadInput(
            "give --keys DIR (made by `strata fleet keys`), or --insecure for a plain-text server on this machine alone"
        )
    folder = None if insecure or keys is None else KeyFolder(keys.absolute())
    if folder is not None:
        folder.check_server()
        _check_expiry(folder, say)
    need_free(address)
    access = Access.of(address.local, keys, insecure)
    with Signals(), _state(data_dir) as state:
        env = environment(state / "flower")
        if access.token is not None:
            env[TOKEN] = access.token
        log = state / "server.log"
        before = log.stat().st_size if log.exists() else 0
        process = start(_command(address, folder, data_dir, new_secret(state / "flower")), env, log)
        try:
            if not wait_until(lambda: _answers(access), process, START):
                raise _Failed(f"the server did not start; the end of {log}:\n{last_lines(log, since=before)}")
            roll = Roll(folder, access, say)
            roll.update()
            security = "plain text, this machine only" if folder is None else "TLS, registered devices only"
            say(f"serving at {address} ({security}); log: {log}")
            say("stop with Ctrl-C")
            while process.poll() is None:
                time.sleep(LOOK)
                roll.update()
            raise _Failed(f"the server's process ended; the end of {log}:\n{last_lines(log, since=before)}")
        except Stopped:
            say("stopping")
            return 0
        except _Failed as failure:
            say(str(failure))
            return 1
        finally:
            end(process)


class _Failed(Exception):
    pass


class Roll:
    """Who is admitted: the keys in registered/. A key that is added or removed while the server runs counts at once."""

    def __init__(self, folder: KeyFolder | None, access: Access, say: Callable[[str], None]) -> None:
        self.folder, self.access, self.say = folder, access, say
        self.known: dict[str, bytes] | None = None

    def update(self) -> None:
        if self.folder is None:
            return
        wanted = {path.stem: path.read_bytes() for path in sorted(self.folder.registered.glob("*.pub"))}
        if wanted == self.known:
            return
        with connect(self.access) as client:
            self._apply(client, wanted)
        self.known = wanted

    def _apply(self, client: Any, wanted: dict[str, bytes]) -> None:
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest

        there = {
            bytes(node.public_key): node.node_id
            for node in client.ListNodes(ListNodesRequest()).nodes_info
            if node.status != "unregistered"
        }
        keys: dict[bytes, str] = {}
        for name, text in wanted.items():
            try:
                keys[_as_flower_wants(text)] = name
            except ValueError:
                self.say(f"registered/{name}.pub is not a public key of `strata fleet keys`: left out")
        for key, name in keys.items():
            if key not in there:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
        for key, node_id in there.items():
            if key not in keys:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        new = sorted(set(keys.values()) - set(self.known or {}))
        gone = sorted(set(self.known or {}) - set(wanted))
        if new:
            self.say(f"admitted: {', '.join(new)}")
        if gone:
            self.say(f"no longer admitted: {', '.join(gone)}")
        if not keys:
            self.say("no device is registered: add some with `strata fleet keys`")


def _as_flower_wants(text: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key = serialization.load_ssh_public_key(text)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic curve key")
    return bytes(public_key_to_bytes(key))


def _command(address: Address, folder: KeyFolder | None, data_dir: Path | None, secret: Path) -> list[str]:
    command = python(
        "strata.fleet.superlink", "--host", address.host, "--port", str(address.port), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation",
    )  # fmt: skip
    if data_dir is not None:
        command += ["--database", str(data_dir.absolute() / "fleet.sqlite")]
    if folder is None:
        return [*command, "--insecure"]
    return [
        *command, "--enable-supernode-auth", "--ssl-ca-certfile", str(folder.authority),
        "--ssl-certfile", str(folder.certificate), "--ssl-keyfile", str(folder.key),
    ]  # fmt: skip


def _answers(access: Access) -> bool:
    try:
        need_server(access.address, access.authority)
    except Unreachable:
        return False
    return True


def _check_expiry(folder: KeyFolder, say: Callable[[str], None]) -> None:
    import datetime

    from strata.fleet.certificates import expiry_of

    left = expiry_of(folder.certificate.read_bytes()) - datetime.datetime.now(datetime.UTC)
    if left.days < 0:
        raise BadInput(
            f"the server's certificate has expired: make another with `strata fleet keys {folder.path} --renew`"
        )
    if left.days < SOON:
        say(f"the server's certificate expires in {left.days} days: `strata fleet keys {folder.path} --renew`")


@contextlib.contextmanager
def _state(data_dir: Path | None) -> Iterator[Path]:
    """The folder of the server's log and records: the user's, for one server at a time, or one that is removed."""
    if data_dir is None:
        with tempfile.TemporaryDirectory(prefix="strata-server-") as folder:
            yield Path(folder)
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir, f"another server is using {data_dir}: end it, or choose another --data-dir"):
        yield data_dir.absolute()
