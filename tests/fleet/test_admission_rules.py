"""Who is admitted while the server runs, with Flower's control interface played: no key ends the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
import httpx

from strata.core.errors import BadInput
from strata.fleet.security.addresses import Address
from strata.fleet.security.keys import KeyFolder, make_keys
from strata.fleet.security.revocation import revoke, rotate_device
from strata.fleet.server import admission
from strata.fleet.server.admission import Admission
from strata.fleet.server.control import Access


class Control:
    """As Flower's (1.41): it never forgets a key, and stumbles after shutting out a device it has never seen."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.failure: Exception | None = None

    def ListNodes(self, request: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(nodes_info=self.nodes)

    def RegisterNode(self, request: Any) -> None:
        if request.public_key in [node.public_key for node in self.nodes]:
            raise _status(412)
        self.nodes.append(
            SimpleNamespace(
                public_key=request.public_key, name=request.name, node_id=len(self.nodes), status="registered"
            )
        )

    def UnregisterNode(self, request: Any) -> None:
        self.nodes[request.node_id].status = "unregistered"
        raise _status(500)

    def admitted(self) -> list[str]:
        return sorted(node.name for node in self.nodes if node.status != "unregistered")


def _status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=httpx.Request("POST", "https://a"), response=httpx.Response(code))


class World:
    def __init__(self, folder: Path) -> None:
        make_keys(folder, [], ["a", "b"])
        self.registered = folder / "registered"
        self.control = Control()
        self.said: list[str] = []
        self.admission = self.restarted()

    def restarted(self) -> Admission:
        return Admission(KeyFolder(self.registered.parent), Access(Address("localhost", 1), None, None), self.hear)

    def hear(self, text: str) -> None:
        self.said.append(text)

    def look(self) -> list[str]:
        """What is said."""
        self.said.clear()
        self.admission.look()
        return list(self.said)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path / "keys")

    @contextlib.contextmanager
    def connect(access: Access) -> Iterator[Control]:
        yield world.control

    monkeypatch.setattr(admission, "connect", connect)
    return world


def test_a_key_that_was_shut_out_stays_out(world: World) -> None:
    assert world.look() == ["admitted: a, b"]
    text = (world.registered / "a.pub").read_bytes()
    revoke(KeyFolder(world.registered.parent), "a")
    assert world.look() == ["no longer admitted: a"]
    (world.registered / "a.pub").write_bytes(text)
    (complaint,) = world.look()
    assert complaint.startswith("registered/a.pub: this key was shut out, which is for good: make another with `strata")
    assert world.look() == [] and world.control.admitted() == ["b"]
    world.admission = world.restarted()  # with the same database
    assert world.look() == [complaint, "admitted: b"]


def test_an_empty_folder_shuts_nobody_out(world: World) -> None:
    """As a backup or a mount may leave it, for a moment."""
    world.look()
    keys = {path: path.read_bytes() for path in world.registered.iterdir()}
    for path in keys:
        path.unlink()
    said = world.look()
    assert len(said) == 2 and all("is missing: this device stays admitted" in text for text in said)
    assert world.control.admitted() == ["a", "b"]
    for path, text in keys.items():
        path.write_bytes(text)
    assert world.look() == [] and world.control.admitted() == ["a", "b"]


def test_another_key_under_the_same_name(world: World) -> None:
    world.look()
    rotate_device(KeyFolder(world.registered.parent), "a")
    assert world.look() == [] and world.control.admitted() == ["a", "b"]
    assert [node.status for node in world.control.nodes] == ["unregistered", "registered", "registered"]


def test_a_key_that_was_revoked_before_the_server_saw_it(world: World) -> None:
    text = (world.registered / "a.pub").read_bytes()
    revoke(KeyFolder(world.registered.parent), "a")
    (world.registered / "a.pub").write_bytes(text)
    assert world.look()[1:] == ["admitted: b"] and world.control.admitted() == ["b"]


def test_files_that_are_no_keys(world: World) -> None:
    for name, content in (("x", b"ssh-foo AAAA"), ("y", b""), ("z", b"ssh-ed25519 \xff")):
        (world.registered / f"{name}.pub").write_bytes(content)
    left_out = [f"registered/{name}.pub is not a public key of `strata fleet keys`: left out" for name in "xyz"]
    assert world.look() == [*left_out, "admitted: a, b"]
    (world.registered / "y.pub").unlink()
    assert world.look() == []  # what has been said is not said again


def test_a_file_or_folder_that_cannot_be_read_shuts_nobody_out(world: World) -> None:
    world.look()
    key = world.registered / "a.pub"
    text = key.read_bytes()
    key.unlink()
    key.symlink_to("/nowhere")
    unreadable = "registered/a.pub cannot be read: this device is admitted, or not, as before"
    assert world.look() == [unreadable]
    world.admission = world.restarted()
    assert world.look() == [unreadable, "admitted: a, b"]
    key.unlink()
    key.write_bytes(text)
    assert world.look() == [] and world.control.admitted() == ["a", "b"]
    world.registered.rename(world.registered.with_name("elsewhere"))
    assert "FileNotFoundError" in world.look()[0] and world.look() == []
    assert world.control.admitted() == ["a", "b"]


def test_a_call_that_fails_is_made_again(world: World) -> None:
    world.control.failure = BadInput("the server at localhost:1 stopped answering (ReadTimeout)")
    (trouble,) = world.look()
    assert "trying again: the server at localhost:1 stopped answering" in trouble
    assert world.look() == []
    world.control.failure = None
    assert world.look() == ["admitted: a, b"]
