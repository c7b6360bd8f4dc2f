"""Who takes part in a run: the devices it began with, who has joined since, without those who have left.

Before each attempt at a round whoever has come is taken in, with the level that its memory is enough for, and whoever
was away for too long, or was shut out, has left. Each such change is in the run's fleet.json, with its round, so that
who was sampled can be said again (federation/membership.py). A device that comes back has the number and level it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.federation.membership import JOINED, LEFT, MembershipLog, Present
from strata.fleet.server.levels import Assignment, level_for
from strata.fleet.server.members import Device, in_order
from strata.fleet.server.members_record import Told
from strata.runs.allowance import Allowance

if TYPE_CHECKING:
    from strata.fleet.server.engine import FlowerEngine


@dataclass
class Roster:
    """By device number: `names`, `samples`, and levels in `assignment`. `needed`: members, or a round waits for more,
    `wait` seconds at the most; who is away for longer has left."""

    names: list[str]
    samples: list[int]
    assignment: Assignment
    log: MembershipLog
    per_round: int
    open: bool = True  # False: nobody joins or leaves any more
    needed: int = 1
    wait: float = 600.0
    say: Callable[[str], None] = print
    save: Callable[[], None] = lambda: None
    told: Told = lambda what, name, key: None
    _resumed: bool = False
    _waiting: tuple[int, float] = field(default=(-1, 0.0))  # round, and until when

    def at(self, round: int, attempt: int, engine: FlowerEngine) -> Present:
        """Who may be asked in this attempt."""
        if not self._resumed:
            self._go_back(round)
        if self.open:
            engine.listen()
            self._update(round, attempt, engine)
            while len(self.log.members(round, attempt)) < self.needed and time.monotonic() < self._until(round):
                engine.messenger.pause()
                engine.listen()
                self._update(round, attempt, engine)
        return self.log.present(round, attempt, self.per_round)

    def _until(self, round: int) -> float:
        """A round waits for new members once, not in each attempt."""
        if self._waiting[0] != round:
            self._waiting = (round, time.monotonic() + self.wait)
        return self._waiting[1]

    def _go_back(self, round: int) -> None:
        """Where a run is resumed: who came after this round's beginning comes again, or does not."""
        self.log.go_back(round)
        self.assignment.at(round)  # forgets moves of rounds that are run again: numbers may get other owners
        count = self.log.numbers
        del self.names[count:], self.samples[count:], self.assignment.joined[count - self.log.first :]
        self._resumed = True

    def _update(self, round: int, attempt: int, engine: FlowerEngine) -> None:
        members = self.log.members(round, attempt)
        here = engine.connected.devices
        known = {name: number for number, name in enumerate(self.names)}
        changed = False
        for name in [self.names[number] for number in sorted(members)]:
            reason = engine.gone_for_good(name, self.wait) if name not in here else None
            if reason is not None:
                self._change(round, attempt, known[name], LEFT, reason)
                changed = True
        for device in in_order(device for name, device in here.items() if known.get(name) not in members):
            changed |= self._take_in(round, attempt, device, known.get(device.name), engine)
        if changed:
            self.save()

    def _take_in(self, round: int, attempt: int, device: Device, number: int | None, engine: FlowerEngine) -> bool:
        if number is None:
            level = level_for(device.budget, self.assignment.levels)
            if level is None:
                least = self.assignment.levels[0]
                engine.connected.turn_away(
                    device, f"{device.name} has {device.budget} bytes and the smallest level needs {least}"
                )
                return False
            number = len(self.names)
            self.names.append(device.name)
            self.samples.append(device.samples)
            self.assignment.joined.append(level)
        self.samples[number] = device.samples  # who comes back may have more by now
        key = engine.messenger.key(device.node)
        level = self.assignment.level(number)
        size = f"at the level of {self.assignment.levels[level]} bytes" if level >= 0 else "too small for any level"
        self._change(round, attempt, number, JOINED, f"{size}, {self.samples[number]} samples", key)
        return True

    def _change(self, round: int, attempt: int, number: int, what: str, detail: str, key: bytes = b"") -> None:
        name = self.names[number]
        self.log.add(round, attempt, number, what)
        self.say(f"{name} {'joins' if what == JOINED else 'has left'} the run in round {round}: {detail}")
        self.told(f"device {what} run", name, key)

    # --- the run's fleet.json -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "samples": self.samples,
            "per_round": self.per_round,
            "changes": self.log.to_json(),
            **self.assignment.to_json(),
        }

    @classmethod
    def of_file(cls, saved: Mapping[str, Any], assignment: Assignment, per_round: int, **more: Any) -> Roster:
        """Of a run that is resumed. Older versions knew no changes."""
        names, samples = list(saved["names"]), list(saved["samples"])
        log = MembershipLog.from_json(len(assignment.start), saved.get("changes", []))
        if not len(names) == len(samples) == log.numbers == len(assignment.start) + len(assignment.joined):
            raise BadInput("the run's fleet.json has names, samples and levels of different numbers of devices")
        return cls(names, samples, assignment, log, int(saved.get("per_round", per_round)), **more)


@dataclass(frozen=True)
class LevelAllowance(Allowance):
    """What each device of a roster may hold: the bytes of the level it has now."""

    assignment: Assignment | None = None

    def of_device(self, device: int) -> int:
        assert self.assignment is not None
        return self.assignment.levels[max(0, self.assignment.level(device))]


def takes_part(saved: Mapping[str, Any]) -> dict[str, bool]:
    """By the name of each device that a run's fleet.json knows: whether it is still in the run."""
    names = saved["names"]
    left = {device: what == LEFT for _, _, device, what in saved.get("changes", [])}
    return {name: not left.get(number, False) for number, name in enumerate(names)}
