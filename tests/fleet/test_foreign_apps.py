"""A device runs Strata's bundle and no other: Flower's own step with real messages and a device's real state."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Message, RecordDict
from flwr.common.config import get_fab_config
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from strata.fleet import flower_patches
from strata.fleet.app_bundle import CONFIG, bundle, bundle_hash


def test_the_bundle_is_one_that_flower_takes_and_holds_no_code() -> None:
    config = get_fab_config(bundle())
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "strata.fleet.server.server_app:app",
        "clientapp": "strata.fleet.device.client_app:app",
    }
    with zipfile.ZipFile(io.BytesIO(bundle())) as file:
        assert file.namelist() == ["pyproject.toml", ".info/CONTENT"]
    # On every machine the same: a change of the bundle must be meant, since devices refuse other bundles.
    assert bundle_hash() == "872701780c2d8a8a3796829278d47e588e5d554b012ce43ff1d9e998c6311008"


def altered() -> bytes:
    """With a file of code."""
    buffer = io.BytesIO(bundle())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr("strata/fleet/device/client_app.py", "import os")
    return buffer.getvalue()


class Node:
    """A device's real state, and Flower's real step that takes a message of run 3, as `strata.fleet` has changed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stores = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(objectstore_factory=stores).state(), stores.store()
        self.state.set_node_id(7)
        for name, number in (("_run_id", 3), ("_node_id", 1), ("_task_id", 9)):  # as in the server app's process
            monkeypatch.setattr(TaskIdentity, name, number)
        self.message = Message(RecordDict(), dst_node_id=7, message_type="train")
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.objects = {name: part.deflate() for name, part in get_all_nested_objects(self.message).items()}
        self.confirmed: list[Any] = []
        self.told = 0
        self.step = flower_patches.only_strata_comes(start_client_internal._pull_and_store_message, self.tell)

    def tell(self) -> None:
        self.told += 1

    def pull(self, content: bytes = bundle(), **other: Any) -> int | None:
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        calls: dict[str, Any] = {
            "receive": lambda: (self.message, get_object_tree(self.message)),
            "get_run": lambda _: Run.create_empty(3),
            "get_fab": lambda *_: fab,
            "pull_object": lambda _, name: self.objects[name],
            "confirm_message_received": lambda *what: self.confirmed.append(what),
        }
        return self.step(
            state=self.state, object_store=self.store, node_config={}, trusted_entities=None, **{**calls, **other}
        )  # fmt: skip


@pytest.mark.parametrize("content, runs", [(bundle(), True), (altered(), False), (b"", False), (CONFIG, False)])
def test_only_strata(
    content: bytes, runs: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch)
    assert node.pull(content) == 3
    assert (node.state.get_run(3) is not None) == runs  # without it no process is started
    assert node.told == int(runs)
    replies = list(node.state.get_messages_legacy(is_reply=True))
    said = capsys.readouterr().out
    assert flower_patches.CONNECTED in said
    if runs:
        assert replies == [] and node.confirmed and "refused" not in said
    else:
        assert [reply.error.reason for reply in replies] == [flower_patches.REFUSED]
        assert replies[0].metadata.reply_to_message_id == node.message.metadata.message_id
        assert "foreign app of run 3" in said


@pytest.mark.parametrize("call", ["pull_object", "confirm_message_received"])
def test_a_run_that_ends_while_its_message_comes_leaves_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> Any:
        raise RunNotRunningException

    node = Node(monkeypatch)
    assert node.pull(**{call: ended}) is None
    assert [task.status.status for task in node.state.get_tasks()] == ["finished"]  # nothing is started for it
    assert list(node.state.get_messages_legacy()) == []


def test_a_reply_that_is_left_over_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    assert node.pull(receive=lambda: None) is None
    reply = Message(RecordDict(), reply_to=node.message)
    start_client_internal._insert_message(reply, node.state, node.store)
    assert node.pull(receive=lambda: None) == 3
    assert len(node.state.get_messages_legacy(is_reply=True)) == 1  # what Flower then sends
    assert node.pull(receive=lambda: None) is None
