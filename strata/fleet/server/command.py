"""`strata fleet server`: a SuperLink behind TLS and the guard, with the registered devices and no others."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from strata.core.children import Signals, Stopped, end, last_lines, locked, start, wait_until
from strata.core.errors import BadInput
from strata.core.paths import writing_to
from strata.fleet.environment import environment, python
from strata.fleet.security.addresses import Address, Unreachable, need_free, need_loopback, need_server
from strata.fleet.security.keys import KeyFolder
from strata.fleet.server.app_processes import new_secret
from strata.fleet.server.control import Access, connect
from strata.fleet.server.superlink import TOKEN

START = 120.0  # seconds for the server to answer
LOOK = 2.0  # seconds between looks at the registered keys
SOON = 30  # days
DATABASE = "fleet.sqlite"  # in --data-dir
GONE = "unregistered"  # in Flower's words


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
    with Signals(), _state(data_dir, say) as state:
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
            roll.look()
            security = "plain text, this machine only" if folder is None else "TLS, registered devices only"
            say(f"serving at {address} ({security}); log: {log}")
            say("stop with Ctrl-C")
            while process.poll() is None:
                time.sleep(LOOK)
                roll.look()
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
        self.known: dict[str, bytes | None] | None = None  # the files, when last everything was in order
        self.admitted: set[str] = set()
        self.complaints: set[str] = set()
        self.trouble = ""  # why the latest look came to nothing

    def look(self) -> None:
        """Brings the server up to date. No trouble here is worth the run that goes on: it is said once, and the next
        look tries again."""
        if self.folder is None:
            return
        trouble = ""
        try:
            self._update(self.folder.registered)
        except Exception as error:
            trouble = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            if trouble != self.trouble:
                self.say(f"the registered devices cannot be looked through, trying again: {trouble}")
        self.trouble = trouble

    def _update(self, registered: Path) -> None:
        # Not by glob: to that a folder that cannot be read is an empty one, and shutting out is for good.
        paths = sorted(path for path in registered.iterdir() if path.suffix == ".pub")
        wanted = {path.stem: _content(path) for path in paths}
        if wanted == self.known:
            return
        with connect(self.access) as client:
            self._apply(client, wanted)
        self.known = wanted

    def _apply(self, client: Any, wanted: Mapping[str, bytes | None]) -> None:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        keys, unreadable, complaints = _keys_of(wanted)
        nodes = _nodes(client)
        for key, node in nodes.items():
            if node.status != GONE and key not in keys and node.name not in unreadable:
                _shut_out(client, node)
        admitted = {node.name for node in nodes.values() if node.status != GONE and node.name in unreadable}
        for key, name in keys.items():
            if key in nodes and nodes[key].status == GONE:  # Flower never forgets a key
                complaints.add(f"registered/{name}.pub: this key was shut out, which is for good: make another")
                continue
            if key not in nodes:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            admitted.add(name)
        self._tell(admitted, complaints)

    def _tell(self, admitted: set[str], complaints: set[str]) -> None:
        for complaint in sorted(complaints - self.complaints):
            self.say(complaint)
        if new := sorted(admitted - self.admitted):
            self.say(f"admitted: {', '.join(new)}")
        if gone := sorted(self.admitted - admitted):
            self.say(f"no longer admitted: {', '.join(gone)}")
        if not admitted:
            self.say("no device is registered: add some with `strata fleet keys`")
        self.admitted, self.complaints = admitted, complaints


def _content(path: Path) -> bytes | None:
    """None: it cannot be read now."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _keys_of(wanted: Mapping[str, bytes | None]) -> tuple[dict[bytes, str], set[str], set[str]]:
    """The names of good keys, the names of files that cannot be read, and what to say of files that are no use."""
    keys: dict[bytes, str] = {}
    unreadable, complaints = set(), set()
    for name, text in wanted.items():
        if text is None:
            unreadable.add(name)
            complaints.add(f"registered/{name}.pub cannot be read: this device is admitted, or not, as before")
            continue
        try:
            keys[_as_flower_wants(text)] = name
        except Exception:  # each kind of nonsense has its own
            complaints.add(f"registered/{name}.pub is not a public key of `strata fleet keys`: left out")
    return keys, unreadable, complaints


def _nodes(client: Any) -> dict[bytes, Any]:
    """By public key, those that were shut out included."""
    from flwr.proto.control_pb2 import ListNodesRequest

    return {bytes(node.public_key): node for node in client.ListNodes(ListNodesRequest()).nodes_info}


def _shut_out(client: Any, node: Any) -> None:
    import httpx
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    try:
        client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
    except httpx.HTTPStatusError:
        # Flower (1.41) stumbles over a device that was never connected, after it has shut it out.
        if _nodes(client)[bytes(node.public_key)].status != GONE:
            raise


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
        "strata.fleet.server.superlink", "--host", address.host, "--port", str(address.port), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation",
    )  # fmt: skip
    if data_dir is not None:
        command += ["--database", str(data_dir.absolute() / DATABASE)]
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

    from strata.fleet.security.certificates import expiry_of

    left = expiry_of(folder.certificate.read_bytes()) - datetime.datetime.now(datetime.UTC)
    if left.days < 0:
        raise BadInput(
            f"the server's certificate has expired: make another with `strata fleet keys {folder.path} --renew`"
        )
    if left.days < SOON:
        say(f"the server's certificate expires in {left.days} days: `strata fleet keys {folder.path} --renew`")


@contextlib.contextmanager
def _state(data_dir: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of the server's log and records: the user's, for one server at a time, or one that is removed."""
    if data_dir is None:
        with tempfile.TemporaryDirectory(prefix="strata-server-") as folder:
            yield Path(folder)
        return
    with writing_to(data_dir):
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data_dir.stat().st_mode & 0o077:
            say(f"other users can look into {data_dir}, though not into the database: `chmod 700 {data_dir}` closes it")
        for file in data_dir.glob(f"{DATABASE}*"):  # has tokens in it; SQLite's own files beside it take after it
            file.chmod(0o600)
    with locked(data_dir, f"another server is using {data_dir}: end it, or choose another --data-dir"):
        yield data_dir.absolute()
