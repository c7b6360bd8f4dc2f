"""FlowerEngine: jobs out to real devices, outcomes back as they arrive. It decides nothing about the model.

Training goes to the device of each job. Evaluation stays on the server where it has data; otherwise every device
evaluates on what it holds out (evaluation.py).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strata.core.errors import BadInput
from strata.core.settings import settings_of
from strata.engines.base import Engine, Outcome
from strata.execution.execution import Execution
from strata.federation.jobs import TrainJob
from strata.fleet.device.work import PLAIN
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import sentence
from strata.fleet.server.evaluation import DeviceEvaluation
from strata.fleet.server.levels import Assignment
from strata.fleet.server.members import ConnectedDevices, Device, digests, program_ids
from strata.fleet.server.messages import Answer, Messenger, plain
from strata.fleet.server.native_devices import NativeDevices, ProgramSigner, StepPrograms
from strata.fleet.server.secure_training import SecureTerms, SecureTraining
from strata.methods.base import Phase
from strata.training import LocalTraining, Update
from strata.training.loop import TaskSeeds

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

Say = Callable[[str], None]
EXECUTED = tuple(settings_of(Execution))


@dataclass
class SentTask:
    """A job that is with its device."""

    index: int
    job: TrainJob
    name: str
    token: str
    until: float
    again: bool = False  # all layers were sent once more, because the device had lost some
    secure: dict[str, Any] | None = None  # what it needs to mask its update; None: it is sent in the clear
    due: int | None = None  # bytes of tensors in its answer; None: those of what the cut trains


@dataclass(frozen=True)
class MaskedUpdate:
    """As the device says; secure_training.py believes none of it."""

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class FlowerEngine:
    """`names`: device number -> name; it grows where devices join. `home` does the server's own work, or is None where
    it has no data.

    `needed`: updates, or a round is redone. `moving` False: devices keep their level, also where it was too much.
    `robust`: what devices measure for evaluation is aggregated by medians, as their updates are.
    `secure`: updates come masked, and only sums of them are seen.
    `programs`: for devices without torch.
    """

    def __init__(
        self,
        messenger: Messenger,
        connected: ConnectedDevices,
        names: list[str],
        assignment: Assignment,
        training: LocalTraining,
        model: str,
        *,
        graph: ChannelGraph,
        home: Engine | None,
        deadline: float | None,
        wait: float,
        say: Say,
        save: Callable[[], None],
        needed: int = 1,
        moving: bool = True,
        robust: bool = False,
        secure: SecureTerms | None = None,
        programs: StepPrograms | None = None,
    ) -> None:
        self.messenger, self.connected, self.names, self._assignment = messenger, connected, names, assignment
        self.training = {name: _plain(getattr(training, name)) for name in PLAIN}
        self.model, self._home, self.deadline, self._wait = model, home, deadline, wait
        self._needed, self._moving = needed, moving
        self._gone: dict[str, float] = {}  # since when a device has not been connected
        self.say, self._save, self._is_saved = say, save, False
        self._evaluation = DeviceEvaluation(self, graph, robust, training.objective)
        self.native = None if programs is None else NativeDevices(self, programs, ProgramSigner.of_environment())
        self._frozen: dict[str, tuple[Any, dict[str, str]]] = {}  # cut -> the state it was taken from, digests
        self._secure = None if secure is None else SecureTraining(self, secure)

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        if not self._is_saved:  # the run's folder is there by now
            self._save()
            self._is_saved = True
        if jobs and not isinstance(jobs[0], TrainJob):
            if self._home is not None:
                yield from self._home.run(jobs, state)
            else:
                yield from self._evaluation.run(jobs, state)
            return
        yield from self._train(jobs, state)

    def close(self) -> None:
        if self._home is not None:
            self._home.close()

    # --- training ----------------------------------------------------------------------------------------------

    def _train(self, jobs: Sequence[TrainJob], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        if not jobs:
            return
        able = [job.task.device for job in jobs if self._assignment.level(job.task.device) >= 0]
        self.await_devices([self.names[number] for number in able], self._needed)
        if self._secure is not None:
            yield from self._secure.run(jobs, state)
            return
        if self.native is not None:
            self.native.offer_for(jobs)
        tasks = [SentTask(index, job, self.names[job.task.device], "", self.until()) for index, job in enumerate(jobs)]
        yield from self._trained(tasks, state)

    def masked(
        self, tasks: Mapping[int, tuple[TrainJob, dict[str, Any], int]], state: Mapping[str, Tensor]
    ) -> Iterator[Outcome]:
        """MaskedUpdates of (job, what it needs to mask its update, bytes of tensors due), by the job's place."""
        sent = [
            SentTask(index, job, self.names[job.task.device], "", self.until(), secure=secure, due=due)
            for index, (job, secure, due) in tasks.items()
        ]
        return self._trained(sent, state)

    def _trained(self, tasks: Sequence[SentTask], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        """Sends them out; what comes back, as it comes."""
        asked: dict[str, SentTask] = {}  # by message
        for task in tasks:
            problem = self._send(asked, task, state)
            if problem is not None:
                yield Outcome(task.index, None, problem, sent=False)
        while asked:
            for answer in self.hear():
                mine = asked.pop(answer.id, None)
                if mine is not None:
                    outcome = self._judge(asked, mine, answer, state)
                    if outcome is not None:
                        yield outcome
            for id, mine in list(asked.items()):
                gone = id not in self.messenger.open
                if gone or time.monotonic() >= mine.until:
                    del asked[id]
                    reason = "disconnected" if gone else f"no answer within {self.deadline:g} s"
                    yield Outcome(mine.index, None, reason)
            if asked:
                self.messenger.pause()

    def _send(self, asked: dict[str, SentTask], mine: SentTask, state: Mapping[str, Tensor]) -> str | None:
        """None, or why this device cannot be asked."""
        task = mine.job.task
        device = self.askable(mine.job)
        if isinstance(device, str):
            return device
        phase = _only_phase(mine.job)
        other = self.native.task(device, phase) if self.native is not None and device.native is not None else {}
        if isinstance(other, str):
            return other
        frozen = self._digests(task.cut, state)
        held = frozenset() if mine.again else device.holds
        mine.token = secrets.token_hex(16)
        left = None if self.deadline is None else max(0.001, mine.until - time.monotonic())
        data = codec.encode(
            {
                "what": "train",
                "model": self.model,
                "token": mine.token,
                "round": task.round,
                "device": task.device,
                "lr": mine.job.lr,
                "seeds": list(astuple(TaskSeeds.of(mine.job.seed, task))),
                "training": self.training_of(phase),
                "cut": task.cut.to_json(),
                "levels": [cut.to_json() for cut in phase.levels],
                "frozen": frozen,
                "deadline": left,
                **({} if mine.secure is None else {"secure": mine.secure}),
                **other,
            },
            {name: task.cut.extract_one(name, state[name]) for name in task.cut.shapes if frozen.get(name) not in held},
        )
        id = self.messenger.send(device.node, "train", data, task.round, left, _due(mine, state))
        if id is None:
            return "the server could not send its task"
        asked[id] = mine
        return None

    def askable(self, job: TrainJob) -> Device | str:
        """The job's device, or why it cannot be asked now."""
        device = self.connected.devices.get(self.names[job.task.device])
        if device is None:
            return "not connected"
        if self._assignment.level(job.task.device) < 0:
            return "has too little memory for any level"
        busy = self.messenger.busy(device.node)
        return device if busy is None else f"still busy with round {busy.round}"

    def training_of(self, phase: Phase) -> dict[str, Any]:
        """With the phase's own way to take steps, where it has one."""
        own = phase.execution
        return self.training if own is None else self.training | {name: getattr(own, name) for name in EXECUTED}

    def _judge(
        self, asked: dict[str, SentTask], mine: SentTask, answer: Answer, state: Mapping[str, Tensor]
    ) -> Outcome | None:
        """The job's outcome; None where the device is asked once more."""
        try:
            outcome, next_step = _read(mine, answer, state)
        except Exception as error:  # what one device writes costs it its update, never the run
            return Outcome(mine.index, None, plain(f"its answer cannot be read ({error!r})"))
        if next_step == "move down":
            return replace(outcome, reason=f"{outcome.reason}; {self.move_down(mine.job)}")
        if next_step == "send all" and not mine.again:
            mine.again = True
            problem = self._send(asked, mine, state)
            return None if problem is None else Outcome(mine.index, None, problem)
        return outcome

    def move_down(self, job: TrainJob) -> str:
        """The job's device could not hold its level; what is said about it."""
        device, name = job.task.device, self.names[job.task.device]
        if not self._moving:
            said = "it keeps its level, and contributes nothing"
        else:
            level = self._assignment.move_down(device, job.task.round)
            self._save()
            size = f"of {self._assignment.levels[level]} bytes" if level >= 0 else ""
            said = f"moved to the level {size}" if level >= 0 else "there is no smaller level for it"
        self.say(f"{name} ran out of memory: {said}")
        return said

    def _digests(self, cut: Cut, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Of the frozen parameters, once per cut and round."""
        known = self._frozen.get(cut.hash)
        if known is None or known[0] is not state:
            self._frozen = {key: value for key, value in self._frozen.items() if value[0] is state}
            made = {
                name: codec.content_digest(cut.extract_one(name, state[name]))
                for name in cut.shapes
                if name in cut.frozen
            }
            self._frozen[cut.hash] = known = (state, made)
        return known[1]

    # --- what training and evaluation share ---------------------------------------------------------------------

    def until(self) -> float:
        return math.inf if self.deadline is None else time.monotonic() + self.deadline

    def hear(self) -> Iterator[Answer]:
        """New answers, other than to greetings; keeps in mind what devices say they hold."""
        self.connected.refresh()
        for answer in self.messenger.answers():
            if answer.sent.what == "hello":
                self.connected.take(answer)
                continue
            self._note_holdings(answer)
            yield answer
        now, here = time.monotonic(), self.connected.devices
        self._gone = {name: self._gone.get(name, now) for name in self.names if name not in here}

    def listen(self) -> None:
        """Hears who came and who left; answers that come now are of work that nobody waits for any more."""
        for _ in self.hear():
            pass

    def gone_for_good(self, name: str, seconds: float) -> str | None:
        """Why a device that is not here has left; None where it may come back."""
        if name in self.messenger.shut_out:
            return "it was shut out for good"
        away = time.monotonic() - self._gone.get(name, math.inf)
        return f"it has been away for {away:.0f} s" if away > seconds else None

    def _note_holdings(self, answer: Answer) -> None:
        if answer.packet is None or "holds" not in answer.packet.meta:
            return
        for name, device in self.connected.devices.items():
            if device.node == answer.sent.node:
                try:
                    held = digests(answer.packet.meta["holds"])
                except codec.Malformed:
                    held = frozenset()
                self.connected.devices[name] = replace(device, holds=held, programs=_programs(answer, device))
                return

    def await_devices(self, wanted: Sequence[str], needed: int) -> None:
        """Until so many of these can be asked, or too many have been away for too long to wait for them: a broken
        connection must not use up a round's attempts."""
        needed = min(max(1, needed), len(wanted))
        while True:
            self.listen()
            free = [name for name in wanted if self.is_free(name)]
            expected = [name for name in wanted if name not in free and self._is_expected(name)]
            if len(free) >= needed or len(free) + len(expected) < needed:
                return
            self.messenger.pause()

    def _is_expected(self, name: str) -> bool:
        """It is away, or at earlier work, but has not been so for long."""
        device = self.connected.devices.get(name)
        busy = None if device is None else self.messenger.busy(device.node)
        since = busy.at if busy is not None else self._gone.get(name, -math.inf)
        return time.monotonic() < since + self._wait

    def is_free(self, name: str) -> bool:
        device = self.connected.devices.get(name)
        return device is not None and self.messenger.busy(device.node) is None

    def free_devices(self) -> list[tuple[int, Device]]:
        return [(number, self.connected.devices[name]) for number, name in enumerate(self.names) if self.is_free(name)]


def _read(mine: SentTask, answer: Answer, state: Mapping[str, Tensor]) -> tuple[Outcome, str]:
    """What the answer is, and what it asks for: to move the device down, to send all layers, or nothing."""
    index, task = mine.index, mine.job.task
    if answer.packet is None:
        return Outcome(index, None, answer.error), ""
    meta = answer.packet.meta
    what = plain(meta.get("what"), 40)
    if what == "failure":
        return Outcome(index, None, sentence(meta.get("kind"))), "move down" if meta.get("kind") == "memory" else ""
    if what != ("update" if mine.secure is None else "masked"):
        return Outcome(index, None, f"sent {what} in place of an update"), "send all" if what == "lacks" else ""
    if meta.get("round") != task.round:  # as federation/checking will say, for which it needs no tensors
        return Outcome(index, update_of(meta, {})), ""
    if meta.get("token") != mine.token:
        return Outcome(index, None, "answered another message"), ""
    due = _due(mine, state)
    if len(answer.packet.body) != due:  # said before it is copied: it may be anything that Flower carries
        return Outcome(index, None, f"sent {len(answer.packet.body)} bytes of tensors, not {due}"), ""
    if mine.secure is not None:
        return Outcome(index, MaskedUpdate(meta, answer.packet.tensors())), ""
    return Outcome(index, update_of(meta, answer.packet.tensors())), ""


def _due(mine: SentTask, state: Mapping[str, Tensor]) -> int:
    return due_bytes(mine.job.task.cut, state) if mine.due is None else mine.due


def due_bytes(cut: Cut, state: Mapping[str, Tensor]) -> int:
    """Of the update: what the cut trains."""
    return sum(state[name].element_size() * math.prod(cut.shapes[name]) for name in cut.trained)


def update_of(meta: Mapping[str, Any], tensors: dict[str, Tensor]) -> Update:
    """As the device says; federation/checking believes none of it."""
    said: Any = meta.get
    loss = said("loss")
    return Update(
        round=said("round"),
        device=said("device"),
        tensors=tensors,
        samples=said("samples"),
        loss=math.nan if loss is None else loss,
        peak_bytes=said("peak_bytes"),
        cut_hash=said("cut"),
    )


def _programs(answer: Answer, device: Device) -> frozenset[str]:
    """As it says, where it says so: one that had no more room has let some go."""
    assert answer.packet is not None
    try:
        return program_ids(answer.packet.meta.get("programs", list(device.programs)))
    except codec.Malformed:
        return frozenset()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _only_phase(job: TrainJob) -> Phase:
    """Devices know cuts and levels; what is the method's own code stays here."""
    phase, *more = job.task.phases
    if job.keeping is not None:
        raise BadInput("real devices keep nothing of a method between rounds: simulate this method instead")
    if more or phase != Phase(phase.cut, phase.execution, phase.levels):
        raise BadInput("real devices train one phase a round, with the run's own loss: simulate this method instead")
    return phase
