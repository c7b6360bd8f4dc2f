"""An answer that would become more than its task can have is given up before it becomes anything."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

from strata.fleet.protocol.envelope import content, payload
from strata.fleet.server import server_app
from strata.fleet.server.answer_size import SLACK, AnswerTooLarge, at_most, bounded, counted, made_of

pytestmark = pytest.mark.usefixtures("identity")

MIB = 2**20
inflate, pull = bounded(inflate_object_from_contents), counted(pull_objects)


def objects(record: RecordDict) -> tuple[str, dict[str, bytes]]:
    """As they lie on the server: the answer's id, and what each object says."""
    message = Message(record, 7, "train")
    return message.object_id, {id: one.deflate() for id, one in get_all_nested_objects(message).items()}


def repeated(contents: dict[str, bytes], times: int) -> None:
    """Its array names its one chunk so often."""
    ((id, array),) = [(id, one) for id, one in contents.items() if one.startswith(b"Array ")]
    head, _, body = array.partition(b"\x00")
    values = json.loads(body)
    values["arraychunk_ids"] *= times
    body = json.dumps(values).encode()
    contents[id] = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\x00" + body


def test_an_honest_answer_passes() -> None:
    data = bytes(6 * MIB)  # two chunks, one of them of 5 MiB
    id, contents = objects(content(data))
    assert 6 * MIB < made_of(contents) < 6 * MIB + SLACK
    with at_most(6 * MIB):
        assert payload(inflate(id, contents).content) == data


def test_a_chunk_named_a_thousand_times_is_not_put_together() -> None:
    id, contents = objects(content(bytes(MIB)))
    repeated(contents, 4000)
    assert made_of(contents) > 4000 * MIB and sum(map(len, contents.values())) < 2 * MIB
    with at_most(MIB), pytest.raises(AnswerTooLarge, match="it would become 41943.* and its task has 1048576"):
        inflate(id, contents)


def test_other_objects_than_an_answers_are_not_put_together() -> None:
    id, contents = objects(RecordDict({"strata": ConfigRecord({"numbers": [1] * 1000})}))
    with at_most(MIB), pytest.raises(AnswerTooLarge, match="'ConfigRecord', which no answer has"):
        inflate(id, contents)


def test_no_more_is_fetched_than_the_task_can_have() -> None:
    asked: list[str] = []

    def one(id: str) -> bytes:
        asked.append(id)
        return bytes(MIB)

    with at_most(3 * MIB):
        assert len(pull(["a", "b", "a", "b", "c"], one)) == 3 and sorted(asked) == ["a", "b", "c"]
        asked.clear()
        with pytest.raises(AnswerTooLarge, match="more than the 3145728 bytes of its task"):
            pull([str(number) for number in range(1000)], one)
    assert len(asked) < 100  # those that were on their way


def test_the_server_app_leaves_the_machine_some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(server_app, "memory_limit", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, 900))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.append((kind, values)))
    server_app.limit_memory()
    assert limits == [(resource.RLIMIT_DATA, (750, 900))]
