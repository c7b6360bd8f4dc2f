"""What a device's answer may become in the server app's memory: no more than its task can have.

Flower puts an answer together from objects, and an array names its chunks in a list: one chunk of 5 MiB, named a
thousand times, becomes 5 GB. So what is fetched is counted as it comes, and what the list would make of it in advance.
An answer of Strata's is one array of bytes (protocol/envelope.py), so nothing else is put together at all.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

SLACK = 256 << 10  # bytes of Flower's own around the array: ids, metadata, the list of chunks
KINDS = frozenset({"Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk"})

_most: ContextVar[int | None] = ContextVar("most bytes of an answer", default=None)


class AnswerTooLarge(Exception):
    """It is, or would become, more than its task can have."""


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """Answers that are fetched here have no more bytes than this."""
    token = _most.set(size)
    try:
        yield
    finally:
        _most.reset(token)


def counted(pull_objects: Callable[..., dict[str, bytes]]) -> Callable[..., dict[str, bytes]]:
    """Flower's fetching of an answer's objects, given up as soon as they are too many bytes."""

    def pull_counted(
        object_ids: Sequence[str], pull_object_fn: Callable[[str], bytes], **more: Any
    ) -> dict[str, bytes]:
        most = _most.get()
        fetched, lock = 0, threading.Lock()

        def pull(object_id: str) -> bytes:
            nonlocal fetched
            content = pull_object_fn(object_id)
            with lock:
                fetched += len(content)
                if most is not None and fetched > most + SLACK:
                    raise AnswerTooLarge(f"it has more than the {most} bytes of its task")
            return content

        return pull_objects(object_ids=list(dict.fromkeys(object_ids)), pull_object_fn=pull, **more)

    return pull_counted


def bounded(inflate: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's putting together of an answer, once it is known what that makes."""

    def inflate_bounded(object_id: str, object_contents: dict[str, bytes], **more: Any) -> Any:
        most = _most.get()
        if most is not None:
            size = made_of(object_contents)
            if size > most + SLACK:
                raise AnswerTooLarge(f"it would become {size} bytes, and its task has {most}")
        return inflate(object_id, object_contents, **more)

    return inflate_bounded


def made_of(contents: Mapping[str, bytes]) -> int:
    """Bytes of the arrays that these objects make; AnswerTooLarge where there are others than an answer has."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import get_object_body
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of

    total = 0
    for content in contents.values():
        kind, children, _ = head_of(content)
        if kind not in KINDS:
            raise AnswerTooLarge(f"it has an object of the kind {kind[:40]!r}, which no answer has")
        if kind == "Array":
            chunks = json.loads(get_object_body(content, Array))["arraychunk_ids"]  # as Flower reads it
            total += sum(len(contents[children[number]]) for number in chunks)
    return total
