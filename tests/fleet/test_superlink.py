"""How much a device may announce before the server says no."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import FlowerError
from flwr.superlink.servicer.fleet import fleet_handlers

from strata.fleet.flower_patches import MOST_OBJECTS, within_bounds


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
