"""Which devices the server admits: those whose public keys are registered in the key folder, until they are revoked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.fleet.security.audit import AuditLog
from strata.fleet.security.keys import KeyFolder
from strata.fleet.security.signatures import fingerprint
from strata.fleet.server.control import Access, connect

GONE = "unregistered"  # in Flower's words


class Admission:
    """Who is admitted: the keys in registered/, but for those in revoked/. A key that comes to either while the server
    runs counts at once. One that is missing stays admitted: Flower never forgets a key that was shut out, and a folder
    may be empty for a moment."""

    def __init__(
        self, folder: KeyFolder | None, access: Access, say: Callable[[str], None], audit: AuditLog | None = None
    ) -> None:
        self.folder, self.access, self.say, self.audit = folder, access, say, audit
        self.known: object = None  # the files, when last everything was in order
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
            self._update(self.folder)
        except Exception as error:
            trouble = str(error) if isinstance(error, BadInput) else one_line(error, kind=True)
            if trouble != self.trouble:
                self.say(f"the registered devices cannot be looked through, trying again: {trouble}")
        self.trouble = trouble

    def _update(self, folder: KeyFolder) -> None:
        wanted, revoked = _files(folder.registered), _files(folder.revoked) if folder.revoked.exists() else {}
        if (wanted, revoked) == self.known:
            return
        with connect(self.access) as client:
            self._apply(client, wanted, set(_keys_of(revoked)[0]))
        self.known = (wanted, revoked)

    def _apply(self, client: Any, wanted: Mapping[str, bytes | None], revoked: Collection[bytes]) -> None:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        keys, _, complaints = _keys_of(wanted)
        named = set(keys.values())
        nodes = _nodes(client)
        admitted = set()
        for key, node in nodes.items():
            if node.status == GONE or (key in keys and key not in revoked):
                continue
            if key in revoked or node.name in named:  # another key has its name
                _shut_out(client, node)
                self._record("device shut out", node.name, key)
                continue
            admitted.add(node.name)
            if node.name not in wanted:
                complaints.add(
                    f"registered/{node.name}.pub is missing: this device stays admitted; bring the file back, or shut "
                    f"it out with `strata fleet revoke {node.name}`"
                )
        for key, name in keys.items():
            if key in revoked or (key in nodes and nodes[key].status == GONE):  # Flower never forgets a key
                complaints.add(
                    f"registered/{name}.pub: this key was shut out, which is for good: make another with `strata fleet "
                    f"rotate device {name}`"
                )
                continue
            if key not in nodes:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                self._record("device admitted", name, key)
            admitted.add(name)
        self._tell(admitted, complaints)

    def _record(self, what: str, name: str, key: bytes) -> None:
        if self.audit is not None:
            self.audit.record(what, device=name, key=fingerprint(key))

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


def _files(folder: Path) -> dict[str, bytes | None]:
    """By name. Not by glob: to that a folder that cannot be read is an empty one."""
    return {path.stem: _content(path) for path in sorted(folder.iterdir()) if path.suffix == ".pub"}


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
