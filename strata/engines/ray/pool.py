"""The workers of a run on the cluster: as many as it has CPUs for. They come and go with its nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strata.core.errors import BadInput
from strata.core.importing import child_path
from strata.engines import wire
from strata.engines.base import EngineFailed, Program
from strata.engines.ray.cluster import ClusterConnection
from strata.engines.ray.packing import pack
from strata.engines.ray.worker import Worker, load_here, versions

LOOK_AGAIN_SECONDS = 1.0  # how often the cluster is asked for its size
STILLBORN = 3  # for each place: workers that died while they started, one after the other, before we give up


@dataclass(eq=False)
class WorkerHandle:
    """One actor. `awaited` is what it does now; a job, or (job is None) something on the way to being ready."""

    actor: Any
    sender: wire.Sender
    awaited: Any
    node: str | None = None  # None: not placed yet
    is_ready: bool = False
    job: int | None = None
    since: float = field(default_factory=time.monotonic)


class Pool:
    def __init__(
        self,
        connection: ClusterConnection,
        program: Program,
        source: Callable[[], Any] | None,
        shared: tuple[type, ...],
        gpus: float,
        most: int | None,
    ) -> None:
        """`source`: makes the program's data from files, on nodes that have them. `most`: workers, if fewer."""
        self.members: list[WorkerHandle] = []
        self._connection, self._ray = connection, connection.ray
        self._shared, self._gpus, self._most, self._source = shared, gpus, most, source
        try:
            data, self._arrays = pack(program)
        except Exception as error:
            raise BadInput(f"the model or training settings cannot be sent to Ray ({error})") from error
        self._program = self._ray.put(data)
        self._sent: dict[str, Any] = {}  # digest -> reference: what travelled because a node did not have it
        self._loaded: dict[str, Any] = {}  # node -> reference, or None where loading failed
        self._actor = self._ray.remote(Worker).options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")
        self._paths = child_path().split(os.pathsep)
        self._looked = float("-inf")
        self._died_young = 0

    def adjust(self) -> None:
        """To the cluster's size. Workers on nodes that are gone are noticed when they are asked something."""
        if time.monotonic() - self._looked < LOOK_AGAIN_SECONDS:
            return
        self._looked = time.monotonic()
        room = self._connection.capacity(self._gpus)
        wanted = room if self._most is None else min(room, self._most)
        while len(self.members) < wanted:
            actor = self._actor.remote(self._paths)
            self.members.append(WorkerHandle(actor, wire.Sender(self._shared), actor.greet.remote()))
        for member in [member for member in self.members if member.node is None]:  # nobody has room for them
            if len(self.members) > wanted:
                self.remove(member)

    def check(self) -> None:
        """Idle workers may have died unseen; a job is not to pay for that."""
        for member in self.members:
            if member.is_ready and member.awaited is None:
                member.awaited = member.actor.check.remote()

    def advance(self, member: WorkerHandle) -> None:
        """What it does on the way to being ready is done: the next step."""
        exceptions = self._ray.exceptions
        awaited, member.awaited = member.awaited, None
        try:
            answer = self._ray.get(awaited)
        except exceptions.RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                raise EngineFailed(
                    f"a Ray worker does not start (is Strata installed on every node?):\n{error}"
                ) from error
            self.remove(member)
            self._died_young += not member.is_ready
            if self._died_young > STILLBORN * max(1, self._connection.capacity(self._gpus)):
                raise EngineFailed(f"Ray workers die while they start, {self._died_young} by now: {error}") from error
            return
        except exceptions.RayTaskError as error:
            raise EngineFailed(f"a Ray worker does not start (is Strata installed on every node?):\n{error}") from error
        except exceptions.RayError:  # the data did not come: the process that loaded it on the node died
            assert member.node is not None
            self._loaded[member.node] = None
            self._prepare(member)
            return
        if member.is_ready:  # it was only asked whether it lives
            return
        if member.node is None:
            member.node, theirs = answer
            if theirs != versions():
                raise EngineFailed(
                    f"a node of the Ray cluster has {theirs}, this machine {versions()}: install the same on both"
                )
            self._prepare(member)
            return
        missing, sentence, detail = answer
        if sentence:
            raise BadInput(sentence)
        if detail:
            raise EngineFailed(f"the workers' program does not start:\n{detail}")
        if missing:
            self._prepare(member, missing)
            return
        member.is_ready = True
        self._died_young = 0

    def remove(self, member: WorkerHandle) -> None:
        self.members.remove(member)
        if self._ray.is_initialized():  # else Ray would start a cluster to kill it in
            self._ray.kill(member.actor)

    def close(self) -> None:
        for member in list(self.members):
            self.remove(member)
        self._sent.clear()
        self._loaded.clear()
        self._program = None

    def _prepare(self, member: WorkerHandle, missing: list[str] | None = None) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert member.node is not None
        node, wanted = member.node, list(self._arrays)
        if self._source is not None and wanted and node not in self._loaded:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = self._ray.remote(load_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            self._loaded[node] = task.remote(self._source, wanted)
        found = [self._loaded[node]] if self._loaded.get(node) is not None else []
        for digest in missing or ():
            if digest not in self._sent:
                self._sent[digest] = self._ray.put({digest: self._arrays[digest]})
            found.append(self._sent[digest])
        member.awaited = member.actor.prepare.remote(self._program, wanted, *found)
