"""Who is in a fleet that changes while a run goes on: a log of who came and who left, which says it for every round.

Devices are numbered in the order in which they first came, and keep their number. Who is sampled in an attempt at a
round follows from the run's seed, the round, the attempt and this log up to there: who has the log can say it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.core.errors import BadInput

MEMBERS = "members"  # a key of metrics.jsonl, in rounds in which devices joined the run or left it
JOINED, LEFT = "joined", "left"


@dataclass(frozen=True)
class Present:
    """Of an attempt at a round."""

    numbers: int  # given so far: devices are 0 to numbers - 1
    members: frozenset[int]  # of these, who may be asked
    per_round: int  # how many are
    joined: tuple[int, ...] = ()  # in this round
    left: tuple[int, ...] = ()

    def to_json(self) -> dict[str, list[int]]:
        """For the round's record: who came and who left in it."""
        return {JOINED: list(self.joined), LEFT: list(self.left)}


@dataclass(frozen=True)
class Change:
    round: int
    attempt: int
    device: int
    what: str  # JOINED or LEFT

    @property
    def at(self) -> tuple[int, int]:
        return self.round, self.attempt


@dataclass
class MembershipLog:
    """`first` devices were there when the run began. Changes stand in the order in which they came."""

    first: int
    changes: list[Change] = field(default_factory=list)

    def add(self, round: int, attempt: int, device: int, what: str) -> None:
        self.changes.append(Change(round, attempt, device, what))

    @property
    def numbers(self) -> int:
        """Given in all."""
        return max([self.first - 1, *(change.device for change in self.changes)]) + 1

    def members(self, round: int, attempt: int) -> frozenset[int]:
        """Who is there in this attempt."""
        there = set(range(self.first))
        for change in self.changes:
            if change.at <= (round, attempt):
                (there.add if change.what == JOINED else there.discard)(change.device)
        return frozenset(there)

    def present(self, round: int, attempt: int, per_round: int) -> Present:
        """`per_round`: as many as were asked for; there may be fewer."""
        known = [change for change in self.changes if change.at <= (round, attempt)]
        members = self.members(round, attempt)
        numbers = max([self.first - 1, *(change.device for change in known)]) + 1
        now = [change for change in known if change.round == round]
        return Present(
            numbers,
            members,
            max(1, min(per_round, len(members))),
            tuple(change.device for change in now if change.what == JOINED),
            tuple(change.device for change in now if change.what == LEFT),
        )

    def go_back(self, round: int) -> None:
        """To the beginning of this round, which is run again: what came later may come otherwise."""
        self.changes = [change for change in self.changes if change.at <= (round, 0)]

    def to_json(self) -> list[list[Any]]:
        return [[change.round, change.attempt, change.device, change.what] for change in self.changes]

    @classmethod
    def from_json(cls, first: int, values: Any) -> MembershipLog:
        if not isinstance(values, list) or not all(_is_change(value) for value in values):
            raise BadInput("the run's record of who joined and left cannot be read: bring fleet.json back from a copy")
        log = cls(first)
        for round, attempt, device, what in values:
            if device > log.numbers or (what == LEFT and device == log.numbers):
                raise BadInput("the run's record of who joined and left has a gap: bring fleet.json back from a copy")
            log.add(round, attempt, device, what)
        return log


def _is_change(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) != 4 or value[3] not in (JOINED, LEFT):
        return False
    return all(type(number) is int and number >= 0 for number in value[:3])
