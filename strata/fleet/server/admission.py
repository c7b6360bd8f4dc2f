"""Which devices the server admits: those whose public keys are in the key folder, as long as they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.fleet.security.keys import KeyFolder
from strata.fleet.server.control import Access, connect

GONE = "unregistered"  # in Flower's words


class Admission:
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
            trouble = str(error) if isinstance(error, BadInput) else one_line(error, kind=True)
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
