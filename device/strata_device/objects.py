"""A message of Strata's in Flower's objects (flwr 1.41): how the server cuts it up, and how an answer is cut up.

A message is a tree, Message > RecordDict > ArrayRecord > Array > ArrayChunk, and each of these an object of its own:
its kind, its children and its length as text, a zero byte, its body. An object's id is the SHA-256 of that. The bytes
themselves are in the chunks, and go to a file and come from one: no more than a chunk is ever in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from strata_device.errors import Refused
from strata_device.wire import NotProtobuf, field, fields, message, one

RECORD, ARRAY, FORM = "strata", "message", "strata.bytes"
CHUNK = 5 << 20  # bytes; the server takes requests of at most 6 MiB
MOST_CHUNKS = 1 << 16
LONGEST_ID = 128


class Metadata(NamedTuple):
    run: int
    id: str
    source: int
    destination: int
    reply_to: str
    group: str
    ttl: float
    kind: str
    created: float
    source_task: int | None = None
    destination_task: int | None = None

    @classmethod
    def read(cls, data: memoryview) -> Metadata:
        found = fields(data)
        kinds = (int, str, int, int, str, str, float, str, float)
        values = [one(found, number, kind, kind()) for number, kind in enumerate(kinds, 1)]
        return cls(*values, *(one(found, number, int, None) for number in (10, 11)))

    def reply(self, now: float) -> Metadata:
        """Of the answer to it; its id is known when the answer is made."""
        return Metadata(
            run=self.run,
            id="",
            source=self.destination,
            destination=self.source,
            reply_to=self.id,
            group=self.group,
            ttl=self.created + self.ttl - now,
            kind=self.kind,
            created=now,
            source_task=self.destination_task,
            destination_task=self.source_task,
        )

    def written(self) -> bytes:
        values: tuple[Any, ...] = self
        plain = [field(number, value) for number, value in enumerate(values[:9], 1)]
        tasks = [field(number, value, always=True) for number, value in enumerate(values[9:], 10)]
        return b"".join(plain + tasks)


class Tree(NamedTuple):
    """The ids of a message's objects."""

    id: str
    children: tuple[Tree, ...] = ()

    @classmethod
    def read(cls, data: memoryview, depth: int = 0) -> Tree:
        if depth > 5:
            raise NotProtobuf("the server's message has more layers than one of Strata's")
        found = fields(data)
        children = tuple(cls.read(memoryview(child), depth + 1) for child in found.get(2, ()))
        id = one(found, 1, str, "")
        if not 0 < len(id) <= LONGEST_ID:
            raise NotProtobuf("the server's message has an object without an id")
        return cls(id, children)

    def written(self) -> bytes:
        return field(1, self.id) + b"".join(message(2, [child.written()]) for child in self.children)


def fetch(tree: Tree, pull: Callable[[str], memoryview], to: Path) -> None:
    """The message's bytes into a file. Refused where it is none of Strata's."""
    record = _only(tree)
    array_record = _only(record)
    array = _only(array_record)
    for part, kind, names in ((record, "RecordDict", [RECORD]), (array_record, "ArrayRecord", [ARRAY])):
        if list(_json(_body(pull(part.id), kind))) != names:
            raise Refused("this is not a message of Strata's")
    said = _json(_body(pull(array.id), "Array"))
    chunks, shape = said.get("arraychunk_ids"), said.get("shape")
    if said.get("dtype") != "uint8" or said.get("stype") != FORM or not isinstance(chunks, list):
        raise Refused("this is not a message of Strata's")
    ids = [child.id for child in array.children]
    if len(chunks) > MOST_CHUNKS or not all(type(number) is int and 0 <= number < len(ids) for number in chunks):
        raise Refused("the server's message names parts that it does not have")
    size = 0
    with to.open("wb") as file:
        for number in chunks:
            size += file.write(_body(pull(ids[number]), "ArrayChunk"))
    if shape != [size]:
        raise Refused("the server's message has another size than it says")


class Answer:
    """A file as the answer to a message: Flower's objects are made of it as they are asked for."""

    def __init__(self, metadata: Metadata, file: Path) -> None:
        self._file = file
        self._chunks: list[tuple[str, int, int]] = []  # id, where it begins, bytes
        at = 0
        with file.open("rb") as data:
            while part := data.read(CHUNK):
                self._chunks.append((_id(_head("ArrayChunk", (), len(part)), part), at, len(part)))
                at += len(part)
        unique = tuple(dict.fromkeys(id for id, _, _ in self._chunks))
        numbers = [unique.index(id) for id, _, _ in self._chunks]
        array = {"dtype": "uint8", "shape": [at], "stype": FORM, "arraychunk_ids": numbers}
        self._small: dict[str, bytes] = {}
        array_id = self._add("Array", unique, json.dumps(array).encode())
        arrays_id = self._add("ArrayRecord", (array_id,), json.dumps({ARRAY: array_id}).encode())
        records_id = self._add("RecordDict", (arrays_id,), json.dumps({RECORD: arrays_id}).encode())
        top = self._add("Message", (records_id,), message(1, [metadata.written()]))
        self.metadata = metadata._replace(id=top)
        leaves = tuple(Tree(id) for id in unique)
        self.tree = Tree(top, (Tree(records_id, (Tree(arrays_id, (Tree(array_id, leaves),)),)),))

    def written(self) -> bytes:
        """The message itself, whose content travels as objects."""
        return message(1, [self.metadata.written()]) + message(2)

    def objects(self, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
        """Chunks first, the message last."""
        for id, at, size in self._chunks:
            if id in wanted:
                wanted.discard(id)
                with self._file.open("rb") as data:
                    data.seek(at)
                    yield id, _head("ArrayChunk", (), size) + data.read(size)
        for id, content in self._small.items():
            if id in wanted:
                yield id, content

    def _add(self, kind: str, children: tuple[str, ...], body: bytes) -> str:
        content = _head(kind, children, len(body)) + body
        id = _id(content)
        self._small[id] = content
        return id


def _head(kind: str, children: tuple[str, ...], size: int) -> bytes:
    return f"{kind} {','.join(children)} {size}".encode() + b"\0"


def _id(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()


def _only(tree: Tree) -> Tree:
    if len(tree.children) != 1:
        raise Refused("this is not a message of Strata's")
    return tree.children[0]


def _body(content: memoryview, kind: str) -> memoryview:
    head, divider, _ = bytes(content[: 64 + 65 * MOST_CHUNKS]).partition(b"\0")  # kind, ids of children, length
    parts = head.split(b" ")
    body = content[len(head) + 1 :]
    if not divider or len(parts) != 3 or parts[0] != kind.encode() or parts[2] != str(len(body)).encode():
        raise Refused("an object of the server's message is not what it should be")
    return body


def _json(data: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("an object of the server's message is not what it should be")
    return value
