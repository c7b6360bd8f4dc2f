"""Training in secure sums: the four stages of fleet/protocol/secure_sum.py with the devices of a round, side by side
for all sums of the round. A device that fails, lies or dies costs its own update, or its sum; sums that stand out among
those of a round are not used (compared_sums.py).
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strata.core.seeds import derive
from strata.engines.base import Outcome
from strata.federation.checking import MOST_BYTES, is_count
from strata.federation.jobs import TrainJob
from strata.federation.summed import Summed, SumOfChanges
from strata.federation.usual_change import UsualChange
from strata.fleet.device.secure_work import LARGEST_LOSS
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import sentence
from strata.fleet.protocol.secure_sum import Collector, Masked, SumFailed, step_of
from strata.fleet.server.compared_sums import standing_out
from strata.fleet.server.messages import Answer, names, plain
from strata.fleet.server.sum_groups import COMPARABLE, SumGroups

if TYPE_CHECKING:
    from strata.fleet.server.engine import FlowerEngine
    from strata.graph import Cut

SEEN = "it was in a sum of this round before: from two sums one could tell what it sent"
PASSES = 3  # of a round, at most: sums over those whose sums came to nothing
STAGE_SECONDS = 300.0  # for an answer that takes no training; the run's own deadline where that is shorter


@dataclass(frozen=True)
class SecureTerms:
    """`fewest`: devices of a sum. `clip`: no value changes by more. `norm`: devices scale their change down to this L2
    norm, for differential privacy. `factor`: a sum whose mean change is so many times the usual one is not used, and
    devices are in several sums that are compared; None: nothing is, and all are in one."""

    fewest: int
    clip: float
    norm: float | None = None
    factor: float | None = None

    @property
    def with_loss(self) -> bool:
        return self.norm is None  # differential privacy does not cover it


@dataclass
class OpenSum:
    """A sum that is being made. `members`: devices' numbers, with their places among the jobs."""

    cut: Cut
    members: dict[int, int]
    collector: Collector
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    peaks: dict[int, int] = field(default_factory=dict)


class SecureTraining:
    def __init__(self, engine: FlowerEngine, terms: SecureTerms) -> None:
        self._engine, self._terms = engine, terms
        self.groups = SumGroups(terms.fewest, compared=terms.factor is not None)
        self._usual = None if terms.factor is None else UsualChange(terms.factor)
        self._round, self._attempt = -1, 0
        self._seen: set[int] = set()  # devices in sums of this round that are known, used or not
        self._lost: set[int] = set()  # places of devices whose sum came to nothing
        self._tried: list[set[int]] = []  # who was summed with whom, for this answer
        self._worked = Counter[int]()  # by place, how often each trained for this answer

    def run(self, jobs: Sequence[TrainJob], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        """Where sums are compared, devices whose sum came to nothing are put into others, a few times: of those nobody
        has learnt a thing. All sums of a round are held against each other at the end."""
        outcomes: dict[int, Outcome] = {}  # by the job's place
        pools = self._pools(jobs, outcomes) if jobs else {}
        made: list[tuple[OpenSum, np.ndarray]] = []
        for _ in range(PASSES if self._usual is not None else 1):
            if not pools:
                break
            for places in pools.values():
                for index in places.values():
                    outcomes.pop(index, None)
            made += self._pass(pools, jobs, state, outcomes)
            pools = self._again(pools)
        self._judge(made, outcomes)
        yield from (self._with_work(outcomes[index], index) for index in range(len(jobs)))

    def _pools(self, jobs: Sequence[TrainJob], outcomes: dict[int, Outcome]) -> dict[Cut, dict[int, int]]:
        """Of devices that can be asked, those that train the same cut, with their places."""
        round = jobs[0].task.round
        if round != self._round:
            self._round, self._attempt, self._seen = round, 0, set()
        self._worked.clear()
        self._tried.clear()
        alike: dict[Cut, dict[int, int]] = {}
        left_out = self.groups.excused([job.task.device for job in jobs])
        for index, job in enumerate(jobs):
            device = job.task.device
            found = SEEN if device in self._seen else left_out.get(device) or self._engine.askable(job)
            if isinstance(found, str):
                outcomes[index] = Outcome(index, None, found, sent=False)
            else:
                alike.setdefault(job.task.cut, {})[device] = index
        fewest = self._terms.fewest
        for places in [places for places in alike.values() if len(places) < fewest]:
            few = f"{len(places)} of its kind in this round, and a sum is over at least {fewest} devices"
            outcomes |= {index: Outcome(index, None, few, sent=False) for index in places.values()}
        return {cut: places for cut, places in alike.items() if len(places) >= fewest}

    def _pass(
        self,
        pools: Mapping[Cut, dict[int, int]],
        jobs: Sequence[TrainJob],
        state: Mapping[str, Tensor],
        outcomes: dict[int, Outcome],
    ) -> list[tuple[OpenSum, np.ndarray]]:
        """The stages. Who is in which sum is known to nobody before all have given their keys."""
        self._attempt += 1
        self._lost.clear()
        sums = [OpenSum(cut, places, self._collector(cut)) for cut, places in pools.items()]
        self._stage(sums, jobs, "keys", outcomes)
        sums = self._going_on(sums, outcomes, "begins", "gave their keys")
        seed = derive(jobs[0].seed, "sums", self._round, self._attempt)
        sums = [group for one in sums for group in self._grouped(one, str(seed))]
        self._stage(sums, jobs, "shares", outcomes)
        sums = self._going_on(sums, outcomes, "goes_on", "shared their secrets")
        self._train(sums, jobs, state, outcomes)
        sums = self._going_on(sums, outcomes, "can_end", "sent masked values", worked=True)
        self._stage(sums, jobs, "reveal", outcomes)
        return self._end(sums, outcomes)

    def _collector(self, cut: Cut) -> Collector:
        return Collector(self._terms.fewest, self._length(cut), self._terms.clip)

    def _grouped(self, pool: OpenSum, seed: str) -> list[OpenSum]:
        made = []
        for group in self.groups.of(list(pool.collector.keys), seed):
            members = {device: pool.members[device] for device in group}
            one = OpenSum(pool.cut, members, self._collector(pool.cut), pool.id)
            one.collector.keys = {device: pool.collector.keys[device] for device in group}
            self._tried.append(set(group))
            made.append(one)
        return made

    def _again(self, pools: Mapping[Cut, dict[int, int]]) -> dict[Cut, dict[int, int]]:
        """Those whose sums came to nothing, not by their own fault as far as anybody knows."""
        found = {}
        for cut, places in pools.items():
            left = {
                device: index
                for device, index in places.items()
                if index in self._lost and not self.groups.is_left_out(device)
            }
            if len(left) >= self._terms.fewest and set(left) not in self._tried:
                found[cut] = left
        return found

    def _with_work(self, outcome: Outcome, index: int) -> Outcome:
        times = self._worked[index]
        if times < 2 or not isinstance(outcome.result, Summed):
            return outcome
        return replace(outcome, result=replace(outcome.result, times=times))

    def _length(self, cut: Cut) -> int:
        return sum(math.prod(cut.shapes[name]) for name in cut.trained) + self._terms.with_loss

    # --- the stages --------------------------------------------------------------------------------------------

    def _stage(self, sums: list[OpenSum], jobs: Sequence[TrainJob], stage: str, outcomes: dict[int, Outcome]) -> None:
        """One message to each device that is still in a sum, and what its answer is worth."""
        asks = {}
        for one in sums:
            said = {"keys": dict, "shares": one.collector.for_shares, "reveal": one.collector.for_reveal}[stage]()
            for device in self._still(one, outcomes):
                asks[one.members[device]] = {"stage": stage, "sum": one.id, "device": device, **said}
        found = self._asked(asks, jobs)
        for one in sums:
            take = getattr(one.collector, f"take_{stage}")
            for device, index in one.members.items():
                if index not in found:
                    continue
                answer = found[index]
                try:
                    if isinstance(answer, str):
                        raise codec.Malformed(answer)
                    take(device, answer)
                except codec.Malformed as error:
                    if stage != "reveal":  # else its update may be in the sum all the same
                        outcomes[index] = Outcome(index, None, plain(error), sent=False)
                        self.groups.failed(device)
                    self._engine.say(f"{self._engine.names[device]}, {stage} of a sum: {plain(error)}")

    def _still(self, one: OpenSum, outcomes: Mapping[int, Outcome]) -> list[int]:
        return [device for device, index in one.members.items() if index not in outcomes]

    def _asked(
        self, asks: Mapping[int, dict[str, Any]], jobs: Sequence[TrainJob]
    ) -> dict[int, Mapping[str, Any] | str]:
        """What each answered, by the job's place; or why there is nothing."""
        engine, found = self._engine, dict[int, Mapping[str, Any] | str]()
        until = min(engine.until(), time.monotonic() + STAGE_SECONDS)
        left = until - time.monotonic()
        sent: dict[str, tuple[int, str]] = {}
        for index, ask in asks.items():
            device, token = engine.askable(jobs[index]), secrets.token_hex(16)
            if isinstance(device, str):
                found[index] = device
                continue
            message = {"what": "secure", "model": engine.model, "token": token, "deadline": left, **ask}
            id = engine.messenger.send(device.node, "secure", codec.encode(message), jobs[index].task.round, left)
            if id is None:
                found[index] = "the server could not send its message"
            else:
                sent[id] = (index, token)
        while sent:
            for answer in engine.hear():
                if answer.id in sent:
                    index, token = sent.pop(answer.id)
                    found[index] = _said(answer, token)
            for id, (index, _) in list(sent.items()):
                gone = id not in engine.messenger.open
                if gone or time.monotonic() >= until:
                    del sent[id]
                    found[index] = "disconnected" if gone else f"no answer within {left:g} s"
            if sent:
                engine.messenger.pause()
        return found

    def _going_on(
        self, sums: list[OpenSum], outcomes: dict[int, Outcome], enough: str, did: str, worked: bool = False
    ) -> list[OpenSum]:
        """Those that still have enough devices; of the others nothing was learnt."""
        on = []
        for one in sums:
            if getattr(one.collector, enough):
                on.append(one)
                continue
            still = self._still(one, outcomes)
            reason = (
                f"given up with its sum: {len(still)} of {len(one.members)} devices {did}, and it takes at least "
                f"{max(one.collector.threshold, self._terms.fewest)}"
            )
            self._engine.say(f"a sum over {self._named(one)} is {reason}")
            for device in still:
                index = one.members[device]
                self._lost.add(index)
                lost = Summed(one.peaks.get(device, 0), lost=reason)
                outcomes[index] = Outcome(index, lost) if worked else Outcome(index, None, reason, sent=False)
        return on

    def _train(
        self, sums: list[OpenSum], jobs: Sequence[TrainJob], state: Mapping[str, Tensor], outcomes: dict[int, Outcome]
    ) -> None:
        engine, terms = self._engine, self._terms
        tasks: dict[int, tuple[TrainJob, dict[str, Any], int]] = {}
        of: dict[int, tuple[OpenSum, int]] = {}
        for one in sums:
            for device in self._still(one, outcomes):
                index = one.members[device]
                job = jobs[index]
                secure = {
                    "sum": one.id,
                    "clip": terms.clip,
                    "norm": terms.norm,
                    "loss": terms.with_loss,
                    "seed": derive(job.seed, "rounding of a secure sum", job.task.round, device) % 2**32,
                    **one.collector.for_masked(device),
                }
                tasks[index] = (job, secure, 4 * one.collector.length)
                of[index] = (one, device)
        for outcome in engine.masked(tasks, state):
            one, device = of[outcome.index]
            if outcome.reason is not None:
                outcomes[outcome.index] = outcome
                self.groups.failed(device)
                continue
            try:
                meta, values = outcome.result.meta, _values(outcome.result.tensors)
                _check(meta, jobs[outcome.index])
                one.collector.take_masked(device, values, meta.get("wrong"))
                one.peaks[device] = meta["peak_bytes"]
                self._worked[outcome.index] += 1
            except Exception as error:  # what one device writes costs it its update, never the run
                said = plain(error) if isinstance(error, codec.Malformed) else plain(f"not masked values ({error!r})")
                outcomes[outcome.index] = Outcome(outcome.index, None, said)
                self.groups.failed(device)

    def _end(self, sums: list[OpenSum], outcomes: dict[int, Outcome]) -> list[tuple[OpenSum, np.ndarray]]:
        made = []
        for one in sums:
            try:
                made.append((one, one.collector.total()))
            except SumFailed as error:
                self._bar(error.liars)
                self._found(self.groups.bad(error.suspects))
                self._lose(one, str(error), outcomes)
                self._lost |= {one.members[device] for device in one.collector.masked if device not in error.liars}
                continue
            self._bar(one.collector.lied)
            self._seen |= set(one.collector.masked)
        return made

    def _judge(self, made: list[tuple[OpenSum, np.ndarray]], outcomes: dict[int, Outcome]) -> None:
        by_cut: dict[Cut, list[tuple[OpenSum, np.ndarray]]] = {}
        for one, values in made:
            by_cut.setdefault(one.cut, []).append((one, values))
        for alike in by_cut.values():
            unusual = self._unusual(alike)
            for place, (one, values) in enumerate(alike):
                if place in unusual:
                    self._found(self.groups.bad(one.collector.masked))
                    self._lose(one, f"of its mean: {unusual[place]}", outcomes)
                    continue
                self.groups.good(one.collector.masked)
                total = self._total(one, values)
                first = min(one.collector.masked, key=lambda device: one.members[device])
                for device in one.collector.masked:
                    index = one.members[device]
                    outcomes[index] = Outcome(index, Summed(one.peaks[device], total if device == first else None))

    def _unusual(self, alike: list[tuple[OpenSum, np.ndarray]]) -> dict[int, str]:
        """Of sums over devices that trained the same cut, those that are not to be used. Three can be compared with
        each other; what was usual before counts where there are fewer."""
        if self._usual is None:
            return {}
        means = [self._changes(values) / len(one.collector.masked) for one, values in alike]
        sizes = [float(np.sqrt(np.square(mean).mean())) if mean.size else 0.0 for mean in means]
        for size in sizes:
            self._usual.note(size)
        found = standing_out(means, step_of(self._terms.clip))
        if len(means) < COMPARABLE:
            found |= {
                place: said for place, size in enumerate(sizes) if (said := self._usual.problem(size)) is not None
            }
        return found

    def _changes(self, values: np.ndarray) -> np.ndarray:
        """Without the loss."""
        return values[: len(values) - self._terms.with_loss]

    def _found(self, devices: Sequence[int]) -> None:
        for device in devices:
            self._engine.say(
                f"{self._engine.names[device]} was alone in a sum with devices whose sums are good, and it was bad "
                f"once more: left out of the next {self.groups.sits_out[device]}"
            )

    def _total(self, one: OpenSum, values: np.ndarray) -> SumOfChanges:
        loss = None
        devices = len(one.collector.masked)
        if self._terms.with_loss:
            loss = float(values[-1]) / self._terms.clip * LARGEST_LOSS / devices
        row = torch.from_numpy(self._changes(values))
        sizes = [math.prod(one.cut.shapes[name]) for name in one.cut.trained]
        parts = zip(one.cut.trained, row.split(sizes), strict=True)
        return SumOfChanges(devices, {name: part.view(one.cut.shapes[name]) for name, part in parts}, loss)

    def _lose(self, one: OpenSum, reason: str, outcomes: dict[int, Outcome]) -> None:
        self._engine.say(f"a sum over {self._named(one)} is not used: {reason}")
        for device in one.collector.masked:
            index = one.members[device]
            outcomes[index] = Outcome(index, Summed(one.peaks[device], lost=f"its sum is not used: {reason}"))

    def _bar(self, liars: Mapping[int, str]) -> None:
        self.groups.bar(liars)
        for device, how in liars.items():
            self._engine.say(f"{self._engine.names[device]} {how}: it is in no further sum of this run")

    def _named(self, one: OpenSum) -> str:
        return names([self._engine.names[device] for device in one.members])


def _said(answer: Answer, token: str) -> Mapping[str, Any] | str:
    if answer.packet is None:
        return answer.error
    meta = answer.packet.meta
    if meta.get("what") == "failure":
        return sentence(meta.get("kind"))
    if meta.get("what") != "secure" or meta.get("token") != token:
        return "answered another message"
    return meta


def _values(tensors: Mapping[str, Tensor]) -> Masked:
    if list(tensors) != ["masked"] or tensors["masked"].dtype != torch.int32:
        raise codec.Malformed("it sent other tensors than masked values")
    return tensors["masked"].numpy().view(np.uint32)


def _check(meta: Mapping[str, Any], job: TrainJob) -> None:
    task = job.task
    if meta.get("device") != task.device or meta.get("cut") != task.cut.hash:
        raise codec.Malformed("it masked another device's update, or that of another cut")
    if not is_count(meta.get("peak_bytes")) or meta["peak_bytes"] > MOST_BYTES:
        raise codec.Malformed("its peak memory is none")
