"""Messages in Flower's objects: the thin device makes those that Flower itself makes, and reads Flower's."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
from strata_device.errors import Refused
from strata_device.objects import Answer, Metadata, Tree, fetch
from strata_device.wire import field, fields, message, one

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower (the extra `flower`) is not installed", allow_module_level=True)

from flwr.app import Message
from flwr.app import Metadata as FlowerMetadata
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from strata.fleet.protocol import envelope

ASKED = Metadata(7, "ab" * 32, 1, 2**63 + 5, "", "3", 3600.0, "train", 1.8e9, 11, None)


def flower_reply(data: bytes, metadata: Metadata) -> Message:
    from flwr.app.message.message import make_message

    made = FlowerMetadata(
        run_id=metadata.run, message_id="", src_node_id=metadata.source, dst_node_id=metadata.destination,
        reply_to_message_id=metadata.reply_to, group_id=metadata.group, created_at=metadata.created, ttl=metadata.ttl,
        message_type=metadata.kind, src_task_id=metadata.source_task, dst_task_id=metadata.destination_task,
    )  # fmt: skip
    return make_message(metadata=made, content=envelope.content(data))


@pytest.mark.parametrize("size", [0, 10, (5 << 20) + 3, 15 << 20])  # the last: three chunks that are alike
def test_an_answer_is_cut_up_as_flower_does(tmp_path: Path, size: int) -> None:
    data = bytes(size) if size > 10 << 20 else random.Random(1).randbytes(size)
    (tmp_path / "answer").write_bytes(data)
    metadata = ASKED.reply(1.8e9 + 10)
    made, theirs = Answer(metadata, tmp_path / "answer"), flower_reply(data, metadata)

    nested = {id: one.deflate() for id, one in get_all_nested_objects(theirs).items()}
    assert made.metadata.id == theirs.object_id and dict(made.objects(set(nested))) == nested
    assert list(dict(made.objects(set(nested))))[-1] == theirs.object_id
    assert made.tree.written() == get_object_tree(theirs).SerializeToString(deterministic=True)
    request = PushMessagesRequest.FromString(message(2, [made.written()]) + message(3, [made.tree.written()]))
    assert request.messages_list[0].metadata.reply_to_message_id == ASKED.id
    assert request.messages_list[0].metadata.dst_task_id == 11
    assert not request.messages_list[0].metadata.HasField("src_task_id")
    assert request.messages_list[0].HasField("content")


def test_flowers_messages_are_read(tmp_path: Path) -> None:
    data = random.Random(2).randbytes((5 << 20) + 100)
    theirs = flower_reply(data, ASKED)
    theirs.metadata.__dict__["_message_id"] = theirs.object_id
    response = PullMessagesResponse(
        messages_list=[message_to_proto(theirs)], message_object_trees=[get_object_tree(theirs)]
    )
    found = fields(response.SerializeToString())
    read = Metadata.read(one(fields(one(found, 2, memoryview, b"")), 1, memoryview, b""))
    assert read == ASKED._replace(id=theirs.object_id)
    tree = Tree.read(one(found, 3, memoryview, b""))
    nested = {id: memoryview(made.deflate()) for id, made in get_all_nested_objects(theirs).items()}
    fetch(tree, nested.__getitem__, tmp_path / "task")
    assert (tmp_path / "task").read_bytes() == data


def test_objects_that_are_not_strata_s_cost_one_sentence(tmp_path: Path) -> None:
    draw = random.Random(3)
    theirs = flower_reply(b"x" * 300, ASKED)
    nested = {id: made.deflate() for id, made in get_all_nested_objects(theirs).items()}
    tree = Tree.read(memoryview(get_object_tree(theirs).SerializeToString()))
    refused = 0
    for _ in range(300):
        victim = draw.choice(list(nested))
        broken = bytearray(nested[victim])
        place = draw.randrange(len(broken))
        broken[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        objects = {**nested, victim: bytes(broken)}
        try:
            fetch(tree, lambda id, objects=objects: memoryview(objects[id]), tmp_path / "task")  # type: ignore[misc]
        except Refused as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100
    with pytest.raises(Refused):
        Tree.read(memoryview(nested_tree(9)))
    with pytest.raises(Refused):
        fetch(Tree("a"), lambda _: memoryview(b""), tmp_path / "task")


def nested_tree(depth: int) -> bytes:
    return field(1, "id") + (message(2, [nested_tree(depth - 1)]) if depth else b"")
