"""How much a device may announce, and leave with the server, before it says no."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import FlowerError
from flwr.superlink.routers.fleet import router
from flwr.superlink.servicer.fleet import fleet_handlers

from strata.fleet import flower_patches
from strata.fleet.flower_patches import MOST_OBJECTS, within_bounds
from strata.fleet.security.stored_bytes import REMEMBERED, StoredBytes


def announcing(objects: int) -> PushMessagesRequest:
    """A root with a branch, and the rest below that."""
    branch = ObjectTree(object_id="branch", children=[ObjectTree(object_id=str(n)) for n in range(objects - 2)])
    return PushMessagesRequest(message_object_trees=[ObjectTree(object_id="root", children=[branch])])


def test_an_answer_may_not_announce_more_than_the_server_can_hold() -> None:
    assert callable(fleet_handlers.push_messages), "Flower has renamed what the server replaces"
    pushed: list[Any] = []
    push = within_bounds(lambda request, state: pushed.append((request, state)))
    push(request=announcing(MOST_OBJECTS), state="state")
    assert pushed == [(announcing(MOST_OBJECTS), "state")]
    with pytest.raises(FlowerError, match="at most 1024 objects"):
        push(request=announcing(MOST_OBJECTS + 1), state="state")
    assert len(pushed) == 1


def test_no_device_fills_the_servers_memory() -> None:
    """Each an eighth of it, all together half; what the app has fetched makes room."""
    stored, store = StoredBytes.within(800), set[str]()
    assert (stored.each, stored.all) == (100, 400)

    def put(device: int, name: str, size: int, into: StoredBytes = stored) -> bool:
        counted = into.take(device, name, size, store)
        if counted:
            store.add(name)
            into.settle(name, True)
        return counted is not None

    assert put(1, "a1", 60) and put(1, "a1", 60) and put(1, "a2", 40) and not put(1, "a3", 1)
    assert put(2, "b1", 100)  # another's
    store.discard("a1")
    assert put(1, "a3", 60) and not put(1, "a4", 1)
    store.discard("a3")
    assert stored.take(1, "a4", 60, store) and not put(1, "a5", 1)  # what is on its way counts
    stored.settle("a4", False)
    assert put(1, "a5", 60)
    full = StoredBytes(100, 400)
    assert all(put(device, str(device), 100, full) for device in range(4)) and not put(9, "9", 1, full)
    for number in range(3 * REMEMBERED):  # what was fetched long ago is not remembered for ever
        assert put(8, f"gone {number}", 0, full)
        store.discard(f"gone {number}")
    assert len(full._kept) <= 2 * REMEMBERED


def test_what_is_not_kept_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_patches, "memory_limit", lambda: 800)
    answers = iter([True, False, False, True])
    push = flower_patches.within_room(lambda request, state: SimpleNamespace(stored=next(answers)))
    state = SimpleNamespace(object_store={"first", "third"})

    def pushed(name: str, size: int) -> bool:
        node = SimpleNamespace(node_id=1)
        request = SimpleNamespace(node=node, object_id=name, object_content=bytes(size))
        return bool(push(request=request, state=state).stored)

    assert pushed("first", 60) and not pushed("first", 60) and not pushed("second", 40) and pushed("third", 40)
    with pytest.raises(FlowerError, match="no room"):
        pushed("fourth", 1)
    assert "fleet_handlers.push_object(request=request, state=state)" in inspect.getsource(router)
