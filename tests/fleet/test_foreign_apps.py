"""A device runs Strata's bundle and no other: Flower's own step with real messages and a device's real state."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Message, RecordDict
from flwr.common.config import get_fab_config
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from strata.fleet import supernode
from strata.fleet.app import CONFIG, bundle, bundle_hash


def test_the_bundle_is_one_that_flower_takes_and_holds_no_code() -> None:
    config = get_fab_config(bundle())
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "strata.engines.flower.server_app:app",
        "clientapp": "strata.engines.flower.client_app:app",
    }
    with zipfile.ZipFile(io.BytesIO(bundle())) as file:
        assert file.namelist() == ["pyproject.toml", ".info/CONTENT"]
    # On every machine the same: a change of the bundle must be meant, since devices refuse other bundles.
    assert bundle_hash() == "3139aacd3dd2cfa53895768806afba2542139405b445b29bcc1377883ecd4d9d"


def altered() -> bytes:
    """With a file of code."""
    buffer = io.BytesIO(bundle())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr("strata/engines/flower/client_app.py", "import os")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "make, runs", [(bundle, True), (altered, False), (lambda: b"", False), (lambda: CONFIG, False)]
)
def test_only_strata(
    make: Callable[[], bytes], runs: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_factory = ObjectStoreFactory()
    factory = NodeStateFactory(objectstore_factory=store_factory)
    state, store = factory.state(), store_factory.store()
    state.set_node_id(7)
    monkeypatch.setattr(TaskIdentity, "_run_id", 3)  # as in the server app's process
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 9)
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = message.object_id
    run = Run.create_empty(3)
    fab = Fab(hashlib.sha256(make()).hexdigest(), make(), {})
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    confirmed: list[Any] = []
    pull = supernode.only_strata(start_client_internal._pull_and_store_message, start_client_internal._insert_message)
    taken = pull(
        state=state, object_store=store, node_config={}, receive=lambda: (message, get_object_tree(message)),
        get_run=lambda _: run, get_fab=lambda *_: fab, trusted_entities=None,
        pull_object=lambda _, name: objects[name], confirm_message_received=lambda *what: confirmed.append(what),
    )  # fmt: skip
    assert taken == 3
    assert (state.get_run(3) is not None) == runs  # without it no process is started
    replies = list(state.get_messages_legacy(is_reply=True))
    said = capsys.readouterr().out
    assert supernode.CONNECTED in said
    if runs:
        assert replies == [] and confirmed and "refused" not in said
    else:
        assert [reply.error.reason for reply in replies] == [supernode.REFUSED]
        assert replies[0].metadata.reply_to_message_id == message.metadata.message_id and "foreign app of run 3" in said
