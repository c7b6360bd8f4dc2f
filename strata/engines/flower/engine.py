"""FlowerEngine: jobs out to real devices, outcomes back as they arrive. It decides nothing about the model.

Training goes to the device of each job. Evaluation stays on the server where it has data; otherwise every device
evaluates on what it holds out (surveying.py).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strata.engines.base import Engine, Outcome
from strata.engines.flower import codec
from strata.engines.flower.bench import PLAIN
from strata.engines.flower.levels import Assignment
from strata.engines.flower.post import Answer, Post, plain
from strata.engines.flower.roster import Device, Roster, digests
from strata.engines.flower.surveying import Survey
from strata.federation.program import TrainJob
from strata.training import LocalTraining, Update

if TYPE_CHECKING:
    from strata.cutting import ChannelGraph, Cut

Say = Callable[[str], None]


@dataclass
class Asked:
    """A job that is with its device."""

    index: int
    job: TrainJob
    name: str
    token: str
    until: float
    again: bool = False  # all layers were sent once more, because the device had lost some


class FlowerEngine:
    """`names`: device number -> name. `home` does the server's own work, or is None where it has no data."""

    def __init__(
        self,
        post: Post,
        roster: Roster,
        names: Sequence[str],
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
    ) -> None:
        self.post, self.roster, self.names, self._assignment = post, roster, list(names), assignment
        self.training = {name: _plain(getattr(training, name)) for name in PLAIN}
        self.model, self._home, self._deadline, self._wait = model, home, deadline, wait
        self.say, self._save, self._is_saved = say, save, False
        self._survey = Survey(self, graph)
        self._frozen: dict[str, tuple[Any, dict[str, str]]] = {}  # cut -> the state it was taken from, digests

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        if not self._is_saved:  # the run's folder is there by now
            self._save()
            self._is_saved = True
        if jobs and not isinstance(jobs[0], TrainJob):
            if self._home is not None:
                yield from self._home.run(jobs, state)
            else:
                yield from self._survey.run(jobs, state)
            return
        yield from self._train(jobs, state)

    def close(self) -> None:
        if self._home is not None:
            self._home.close()

    # --- training ----------------------------------------------------------------------------------------------

    def _train(self, jobs: Sequence[TrainJob], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        if not jobs:
            return
        self.await_someone()
        asked: dict[str, Asked] = {}  # by message
        for index, job in enumerate(jobs):
            problem = self._send(asked, Asked(index, job, self.names[job.task.device], "", self.until()), state)
            if problem is not None:
                yield Outcome(index, None, problem)
        while asked:
            for answer in self.hear():
                mine = asked.pop(answer.id, None)
                if mine is not None:
                    outcome = self._judge(asked, mine, answer, state)
                    if outcome is not None:
                        yield outcome
            for id, mine in list(asked.items()):
                gone = id not in self.post.open
                if gone or time.monotonic() >= mine.until:
                    del asked[id]
                    reason = "disconnected" if gone else f"no answer within {self._deadline:g} s"
                    yield Outcome(mine.index, None, reason)
            if asked:
                self.post.pause()

    def _send(self, asked: dict[str, Asked], mine: Asked, state: Mapping[str, Tensor]) -> str | None:
        """None, or why this device cannot be asked."""
        task = mine.job.task
        device = self.roster.devices.get(mine.name)
        if device is None:
            return "not connected"
        if self._assignment.level(task.device) < 0:
            return "has too little memory for any level"
        busy = self.post.busy(device.node)
        if busy is not None:
            return f"still busy with round {busy.round}"
        frozen = self._digests(task.cut, state)
        held = frozenset() if mine.again else device.holds
        mine.token = secrets.token_hex(16)
        left = None if self._deadline is None else max(0.001, mine.until - time.monotonic())
        data = codec.encode(
            {
                "what": "train", "model": self.model, "token": mine.token, "round": task.round,
                "device": task.device, "lr": mine.job.lr, "seed": mine.job.seed, "training": self.training,
                "cut": task.cut.to_json(), "levels": [cut.to_json() for cut in task.levels], "frozen": frozen,
                "deadline": left,
            },
            {name: task.cut.extract_one(name, state[name]) for name in task.cut.shapes
             if frozen.get(name) not in held},
        )  # fmt: skip
        id = self.post.send(device.node, "train", data, task.round, left)
        if id is None:
            return "the server could not send its task"
        asked[id] = mine
        return None

    def _judge(
        self, asked: dict[str, Asked], mine: Asked, answer: Answer, state: Mapping[str, Tensor]
    ) -> Outcome | None:
        """The job's outcome; None where the device is asked once more."""
        if answer.packet is None:
            return Outcome(mine.index, None, answer.error)
        meta = answer.packet.meta
        if meta.get("what") == "failure":
            reason = plain(meta.get("reason"))
            if meta.get("kind") == "memory":
                reason += self._move_down(mine)
            return Outcome(mine.index, None, reason, str(meta.get("detail", ""))[:4000])
        if meta.get("token") != mine.token and meta.get("round") == mine.job.task.round:
            return Outcome(mine.index, None, "answered another message")
        if meta.get("what") == "lacks" and not mine.again:
            mine.again = True
            problem = self._send(asked, mine, state)
            return None if problem is None else Outcome(mine.index, None, problem)
        if meta.get("what") != "update":
            return Outcome(mine.index, None, f"sent {plain(meta.get('what'), 40)} in place of an update")
        return Outcome(mine.index, update_of(answer.packet))

    def _move_down(self, mine: Asked) -> str:
        """The device could not hold its level; what is said about it."""
        device = mine.job.task.device
        level = self._assignment.move_down(device, mine.job.task.round)
        self._save()
        size = f"of {self._assignment.levels[level]} bytes" if level >= 0 else ""
        said = f"moved to the level {size}" if level >= 0 else "there is no smaller level for it"
        self.say(f"{mine.name} ran out of memory: {said}")
        return f"; {said}"

    def _digests(self, cut: Cut, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Of the frozen parameters, once per cut and round."""
        known = self._frozen.get(cut.hash)
        if known is None or known[0] is not state:
            self._frozen = {key: value for key, value in self._frozen.items() if value[0] is state}
            made = {
                name: codec.content_digest(cut.extract_one(name, state[name]))
                for name in cut.shapes if name in cut.frozen
            }  # fmt: skip
            self._frozen[cut.hash] = known = (state, made)
        return known[1]

    # --- what training and surveying share ---------------------------------------------------------------------

    def until(self) -> float:
        return math.inf if self._deadline is None else time.monotonic() + self._deadline

    def hear(self) -> Iterator[Answer]:
        """New answers, other than to greetings; keeps in mind what devices say they hold."""
        self.roster.refresh()
        for answer in self.post.answers():
            if answer.sent.what == "hello":
                self.roster.take(answer)
                continue
            self._note_holdings(answer)
            yield answer

    def _note_holdings(self, answer: Answer) -> None:
        if answer.packet is None or "holds" not in answer.packet.meta:
            return
        for name, device in self.roster.devices.items():
            if device.node == answer.sent.node:
                try:
                    held = digests(answer.packet.meta["holds"])
                except codec.Malformed:
                    held = frozenset()
                self.roster.devices[name] = replace(device, holds=held)
                return

    def await_someone(self) -> None:
        """Until any device can be asked: a broken connection must not use up a round's attempts."""
        until = time.monotonic() + self._wait
        while True:
            for _ in self.hear():
                pass
            if any(map(self.is_free, self.names)) or time.monotonic() >= until:
                return
            self.post.pause()

    def is_free(self, name: str) -> bool:
        device = self.roster.devices.get(name)
        return device is not None and self.post.busy(device.node) is None

    def free_devices(self) -> list[tuple[int, Device]]:
        return [(number, self.roster.devices[name]) for number, name in enumerate(self.names) if self.is_free(name)]


def update_of(packet: codec.Packet) -> Update:
    """As the device says; federation/checking believes none of it."""
    said: Any = packet.meta.get
    loss = said("loss")
    return Update(
        round=said("round"), device=said("device"), tensors=packet.tensors(), samples=said("samples"),
        loss=math.nan if loss is None else loss, peak_bytes=said("peak_bytes"), cut_hash=said("cut"),
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
