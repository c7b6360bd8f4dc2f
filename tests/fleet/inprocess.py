"""A fleet in the process of the tests: a Grid of functions in place of Flower's, with real devices behind some."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.app.error import Error
from torch import Tensor

from strata.federation.jobs import TrainJob
from strata.fleet.device.own_data import load_own_data
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.envelope import content, payload
from strata.fleet.protocol.settings import DeviceSettings
from strata.fleet.server.engine import FlowerEngine
from strata.fleet.server.levels import Assignment
from strata.fleet.server.members import ConnectedDevices
from strata.fleet.server.messages import Messenger
from strata.graph import ChannelGraph
from strata.methods.base import Task
from strata.models import resnet20
from strata.training import LocalTraining

Answering = Callable[[bytes], bytes | Error | Exception | Message | None]  # None: never answers
TRAINING = LocalTraining(batch_size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
MIB = 2**20


class Grid:
    """Flower's, as far as the messenger uses it. An answer that is an exception is one that Flower cannot unpack."""

    def __init__(self, nodes: dict[int, Answering]) -> None:
        self.nodes = nodes
        self.names: dict[int, str] = {}  # that keys are registered under
        self.shut_out: dict[int, str] = {}  # and were
        self.sent: list[tuple[int, codec.Packet]] = []
        self._ready: dict[str, Message | Exception] = {}
        self._lost: dict[str, Message] = {}  # what Flower says of a message that it has delivered the answer to

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[Any]:
        here = [_node(node, self.names.get(node, ""), "online") for node in self.get_node_ids()]
        return here + [_node(node, name, "unregistered") for node, name in self.shut_out.items()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = id
            node, data = message.metadata.dst_node_id, payload(message.content)
            self.sent.append((node, codec.decode(data)))
            answer = self.nodes[node](data)
            if isinstance(answer, bytes):
                self._ready[id] = Message(content(answer), reply_to=message)
            elif answer is not None:
                self._ready[id] = Message(answer, reply_to=message) if isinstance(answer, Error) else answer
            self._lost[id] = Message(Error(code=3, reason="unavailable"), reply_to=message)
            ids.append(id)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        """All that is asked for counts as delivered before it is unpacked."""
        found: list[Message] = []
        failed: list[Exception] = []
        for id in ids:
            answer = self._ready.pop(id, None)
            if answer is None:
                continue
            self._ready[id] = self._lost[id]
            (failed if isinstance(answer, Exception) else found).append(answer)  # type: ignore[arg-type]
        if failed:
            raise failed[0]
        return found


def _node(number: int, name: str, status: str) -> SimpleNamespace:
    return SimpleNamespace(node_id=number, name=name, status=status, public_key=name.encode())


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(resnet20(num_classes=10), (3, 32, 32))


@cache
def state() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return dict(resnet20(num_classes=10).state_dict())


def prepared(folder: Path, name: str, index: int = 0, hold_out: float = 0.0) -> PreparedDevice:
    settings = DeviceSettings(
        name, budget=64 * MIB, partition="iid", index=index, devices=60, hold_out=hold_out, cache=str(folder / name),
        hard_limit=False,  # it is this process
    )  # fmt: skip
    return replace(_prepared(), settings=settings, own_data=load_own_data(settings))


@cache
def _prepared() -> PreparedDevice:
    return PreparedDevice.of("resnet20", DeviceSettings("some", budget=MIB, partition="iid", devices=60))


def device(made: PreparedDevice) -> Answering:
    return lambda data: made.answer(codec.decode(data), 1)


def fleet(grid: Grid, names: list[str], **more: Any) -> FlowerEngine:
    messenger = Messenger(grid)  # type: ignore[arg-type]
    connected = ConnectedDevices(messenger, "resnet20", lambda text: None)
    connected.gather(len(grid.nodes), 30.0)
    assignment = more.pop("assignment", None) or Assignment((1, 2), (1,) * len(names))
    values: dict[str, Any] = {"home": None, "deadline": None, "wait": 0.1, "say": lambda text: None,
                              "save": lambda: None, "graph": graph(), **more}  # fmt: skip
    return FlowerEngine(messenger, connected, names, assignment, TRAINING, "resnet20", **values)


def job(round: int = 0, number: int = 0, frozen: int = 2) -> TrainJob:
    return TrainJob(Task(round, number, graph().slt(frozen, frozen + 1, 0.3)), np.zeros(25, np.int64), 0.1, 0)


def silent(made: PreparedDevice) -> Answering:
    """Greets, then never answers."""
    return lambda data: made.answer(codec.decode(data), 1) if codec.decode(data).meta["what"] == "hello" else None


def changed(made: PreparedDevice, **meta: Any) -> Answering:
    def answer(data: bytes) -> bytes:
        packet = codec.decode(made.answer(codec.decode(data), 1))
        if packet.meta["what"] != "update":
            return codec.encode(packet.meta, packet.tensors())
        return codec.encode({**packet.meta, **meta}, packet.tensors())

    return answer
