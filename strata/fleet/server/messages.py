"""Messages to devices through Flower's Grid, and their answers as they come.

A message that has timed out is not cancelled: the device may still be at it. So every message stays known until it is
answered, its time is over or its device is gone, and a device with one is busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from flwr.app import Message, MessageType

from strata.fleet.protocol import codec
from strata.fleet.protocol.envelope import content, payload
from strata.fleet.server.answer_size import AnswerTooLarge, at_most

if TYPE_CHECKING:
    from flwr.serverapp import Grid

KINDS = {
    "hello": MessageType.QUERY,
    "train": MessageType.TRAIN,
    "secure": MessageType.QUERY,
    "statistics": MessageType.EVALUATE,
    "evaluate": MessageType.EVALUATE,
}
PAUSE = 0.25  # seconds between looks for answers
REST = 4  # and at least so many times what a look in vain takes, up to LOOK: with many messages it takes a while
LOOK = 2.0  # and between looks for who is connected
LARGEST_HEADER = 1 << 20  # of an answer
UNREGISTERED = "unregistered"  # in Flower's words
PATIENCE = 60.0  # seconds that a message outlives its deadline: for an answer on its way


@dataclass(frozen=True)
class SentMessage:
    node: int
    what: str
    round: int
    at: float
    due: int = 0  # bytes of tensors that the answer has, at most


@dataclass(frozen=True)
class Answer:
    id: str
    sent: SentMessage
    packet: codec.Packet | None
    error: str = ""  # where there is no packet: Flower's word, or what is wrong with it


class Messenger:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.open: dict[str, SentMessage] = {}
        self._nodes: dict[int, str] = {}  # and the name that each one's key is registered under, if any
        self._keys: dict[int, bytes] = {}
        self.shut_out: frozenset[str] = frozenset()  # names whose keys are not admitted any more
        self._looked = float("-inf")
        self._in_vain = 0.0  # seconds that the last look spent on messages without an answer

    def nodes(self, now: bool = False) -> set[int]:
        """Who is connected, as of a moment ago."""
        if now or time.monotonic() - self._looked > LOOK:
            found = list(self._grid.get_nodes())
            here = [node for node in found if node.status != UNREGISTERED]  # flower_patches.with_shut_out
            self.shut_out = frozenset(str(node.name) for node in found if node.status == UNREGISTERED)
            self._nodes = {int(node.node_id): str(node.name) for node in here}
            self._keys = {int(node.node_id): bytes(node.public_key) for node in here}
            self._looked = time.monotonic()
        return set(self._nodes)

    def registered_name(self, node: int) -> str:
        """Of the key that it proved to have; empty on a plain-text server, which knows no keys."""
        return self._nodes.get(node, "")

    def key(self, node: int) -> bytes:
        """As Flower has it; empty on a plain-text server."""
        return self._keys.get(node, b"")

    def send(
        self, node: int, what: str, data: bytes, round: int = 0, deadline: float | None = None, due: int = 0
    ) -> str | None:
        """The message's id; None where Flower does not take it. `due`: bytes of tensors in the answer, at most."""
        ttl = None if deadline is None else deadline + PATIENCE
        message = Message(content(data), node, KINDS[what], ttl=ttl, group_id=str(round))
        ids = list(self._grid.push_messages([message]))
        if not ids or not ids[0]:
            return None
        self.open[ids[0]] = SentMessage(node, what, round, time.monotonic(), due)
        return ids[0]

    def busy(self, node: int) -> SentMessage | None:
        """The message that this device has not answered yet."""
        return next((sent for sent in self.open.values() if sent.node == node), None)

    def forget(self, node: int) -> None:
        """It is gone, and its answers with it."""
        self.open = {id: sent for id, sent in self.open.items() if sent.node != node}

    def answers(self) -> Iterator[Answer]:
        """What has come since the last look.

        Each message is asked for on its own: Flower counts all that one call asks for as delivered before it unpacks
        them, so an answer that it cannot unpack would take those of other devices along.
        """
        self._in_vain = 0.0
        for id in list(self.open):
            if id not in self.open:  # its device has gone in the meantime
                continue
            began = time.monotonic()
            answer = self._answer_to(id)
            if answer is None:
                self._in_vain += time.monotonic() - began
            else:
                del self.open[id]
                yield answer

    def _answer_to(self, id: str) -> Answer | None:
        """None where there is none yet."""
        sent = self.open[id]
        try:
            # Who would answer for another device does not know the id: it is a digest of what only that device was
            # sent. An answer that names another id is lost, and Flower says so at the next look.
            with at_most(sent.due + LARGEST_HEADER):
                found = [one for one in self._grid.pull_messages([id]) if one.metadata.reply_to_message_id == id]
            if not found:
                return None
            if found[0].has_error():
                return Answer(id, sent, None, _reason(found[0]))
            return Answer(id, sent, codec.decode(payload(found[0].content), LARGEST_HEADER))
        except httpx.HTTPStatusError as error:  # the server can be reached, but cannot give out this one answer
            return Answer(id, sent, None, f"its answer cannot be fetched (HTTP {error.response.status_code})")
        except httpx.HTTPError:  # no device's fault: the server cannot be reached
            raise
        except (codec.Malformed, AnswerTooLarge) as error:
            return Answer(id, sent, None, plain(f"its answer cannot be read: {error}"))
        except Exception as error:  # what a device writes can make Flower fail in many ways
            return Answer(id, sent, None, f"its answer cannot be read ({type(error).__name__} in Flower)")

    def pause(self) -> None:
        time.sleep(max(PAUSE, min(REST * self._in_vain, LOOK)))


def _reason(message: Message) -> str:
    return plain(f"no answer ({message.error.reason or f'Flower error {message.error.code}'})")


def plain(text: object, longest: int = 300) -> str:
    """One line of what others wrote."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(text).split()))[:longest]


def names(devices: Sequence[str]) -> str:
    return ", ".join(devices[:8]) + (f" and {len(devices) - 8} others" if len(devices) > 8 else "")
