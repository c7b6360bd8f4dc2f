"""The engine: jobs to idle workers, answers back; each Cut's tensors put once, however many devices share it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strata.core.errors import BadInput
from strata.engines import wire
from strata.engines.base import EngineFailed, Outcome, Program, time_limit
from strata.engines.local import default_workers
from strata.engines.ray import Ray
from strata.engines.ray.cluster import ClusterConnection
from strata.engines.ray.pool import LOOK_AGAIN_SECONDS, Pool, WorkerHandle
from strata.engines.ray.worker import WHOLE

if TYPE_CHECKING:
    from strata.graph import Cut

LOST_NODES = 5  # a job is not blamed for nodes that leave, but not for ever either


class RayEngine:
    """A worker that dies is replaced and its job tried again, on another node where there is one.

    A job is given up when its worker died `retries` + 1 times; not counting workers that went with their node.
    `cuts`: what a job needs of the server's tensors; without it all of them travel. `workers`: at most, else as many as
    the cluster has CPUs. `patience`: seconds to wait for a cluster that has no room at all.
    """

    def __init__(
        self,
        program: Program,
        settings: Ray,
        workers: int | None = None,
        *,
        cuts: Callable[[Any], Sequence[Cut]] | None = None,
        source: Callable[[], Any] | None = None,
        shared: tuple[type, ...] = (),
        retries: int = 1,
        timeout: float | None = None,
        patience: float = 600.0,
    ) -> None:
        if workers is not None and workers < 1:
            raise BadInput(f"the engine ray needs at least 1 worker, not {workers}")
        self._cuts, self._retries, self._timeout, self._patience = cuts, retries, timeout, patience
        self.bytes_put = 0  # of tensors, since the beginning
        self._connection = ClusterConnection(settings, workers or max(1, default_workers()))
        self._ray = self._connection.ray
        try:
            if self._connection.capacity(settings.gpus) < 1:
                gpus = f" and {settings.gpus:g} GPU" if settings.gpus else ""
                raise BadInput(f"the Ray cluster has no node with 1 CPU{gpus}, which each worker needs")
            self._pool: Pool | None = Pool(self._connection, program, source, shared, settings.gpus, workers)
            self._pool.adjust()  # workers prepare while the caller does
        except BaseException:
            self._connection.close()
            raise

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        pool = self._pool
        assert pool is not None, "the engine is closed"
        weights: dict[str, Any] = {}  # Cut hash -> reference; freed by Ray when this call ends
        waiting = deque(range(len(jobs)))
        deaths: list[list[str]] = [[] for _ in jobs]  # the nodes where workers died of it, or with it
        open_jobs, worked = len(jobs), time.monotonic()
        pool.check()
        try:
            while open_jobs:
                pool.adjust()
                for member in [one for one in pool.members if one.is_ready and one.awaited is None]:
                    index = self._choose(waiting, deaths, member)
                    if index is not None:
                        waiting.remove(index)
                        member.job, member.since = index, time.monotonic()
                        member.awaited = self._submit(member, jobs[index], state, weights)
                if any(member.is_ready for member in pool.members):
                    worked = time.monotonic()
                elif time.monotonic() - worked > self._patience:
                    raise EngineFailed(f"no node of the Ray cluster had room for a worker in {self._patience:g} s")
                for member in self._done(pool):
                    index = member.job
                    if index is None:
                        pool.advance(member)
                        continue
                    answer = self._answer(member)
                    if answer is None:
                        pool.remove(member)
                        pool.check()  # it may not be the only one
                        deaths[index].append(member.node or "")
                        if not self._is_hopeless(deaths[index]):
                            waiting.appendleft(index)
                            continue
                        answer = (None, f"its worker process was killed {len(deaths[index])} times", "")
                    open_jobs -= 1
                    yield Outcome(index, *answer)
                for member in [one for one in pool.members if one.job is not None]:
                    assert member.job is not None
                    limit = time_limit(jobs[member.job], self._timeout)
                    if time.monotonic() - member.since >= limit:
                        pool.remove(member)
                        open_jobs -= 1
                        yield Outcome(member.job, None, f"no answer within {limit:g} s")
        finally:  # the caller gave up: what still runs is of no use
            for member in [member for member in pool.members if member.job is not None]:
                pool.remove(member)

    def close(self) -> None:
        """The cluster itself ends only if it was started here."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._connection.close()

    def _choose(self, waiting: Sequence[int], deaths: Sequence[Sequence[str]], member: WorkerHandle) -> int | None:
        """The first that did not lose a worker on this node, if there are workers elsewhere that can try it."""
        assert self._pool is not None
        for index in waiting:
            elsewhere = any(one.is_ready and one.node not in deaths[index] for one in self._pool.members)
            if member.node not in deaths[index] or not elsewhere:
                return index
        return None

    def _submit(self, member: WorkerHandle, job: Any, state: Mapping[str, Tensor], weights: dict[str, Any]) -> Any:
        needed: dict[str, Cut | None] = {WHOLE: None}
        if self._cuts is not None:
            needed = {cut.hash: cut for cut in self._cuts(job)}
        for key, cut in needed.items():
            if key not in weights:
                tensors = dict(state) if cut is None else cut.extract(state)
                self.bytes_put += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                weights[key] = self._ray.put(wire.dump(tensors))
        return member.actor.work.remote(member.sender.dump(job), list(needed), *(weights[key] for key in needed))

    def _done(self, pool: Pool) -> list[WorkerHandle]:
        """Those whose answer is there, after some waiting."""
        awaited = {member.awaited: member for member in pool.members if member.awaited is not None}
        if not awaited:
            time.sleep(LOOK_AGAIN_SECONDS)  # the cluster has no room for anybody
            return []
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=LOOK_AGAIN_SECONDS)
        return [awaited[reference] for reference in ready]

    def _answer(self, member: WorkerHandle) -> tuple[Any, str | None, str] | None:
        """None: the worker, or its answer, is lost."""
        awaited, member.awaited, member.job = member.awaited, None, None
        try:
            answer: tuple[Any, str | None, str] = wire.load(self._ray.get(awaited))
        except self._ray.exceptions.RayError:
            return None
        return answer

    def _is_hopeless(self, nodes: Sequence[str]) -> bool:
        alive = self._connection.nodes()
        return sum(node in alive for node in nodes) > self._retries or len(nodes) > LOST_NODES
