"""Budgets to levels, devices to levels, and devices to smaller levels when theirs was too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.execution import memory
from strata.methods.base import Levels

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import Cut
    from strata.methods import Method
    from strata.methods.slt import SLT


def group(budgets: Sequence[int], most: int) -> list[int]:
    """At most `most` levels, ascending: the smallest budget of each of as many equal groups of distinct budgets."""
    distinct = sorted(set(budgets))
    if len(distinct) <= most:
        return distinct
    return [distinct[number * len(distinct) // most] for number in range(most)]


def level_for(budget: int, levels: Sequence[int]) -> int | None:
    """The largest level (ascending bytes) that fits; None where none does."""
    fitting = [number for number, size in enumerate(levels) if size <= budget]
    return fitting[-1] if fitting else None


def most_bytes(method: Method, execution: Execution) -> list[int]:
    """What a device of each level takes at the most, by `peak`."""

    def count(cut: Cut) -> int:
        return memory(method.graph, cut, execution).total

    return method.most_bytes(count)


@dataclass
class Assignment:
    """Which level each device trains at. `levels`: bytes, ascending; `start`: the level of device 0, 1, ..., which were
    there when the run began; `joined`: of those who came later.

    A move counts from the next attempt on. When a run is resumed, moves of rounds that are done again are forgotten,
    so that they happen again as they did.
    """

    levels: tuple[int, ...]
    start: tuple[int, ...]
    moves: list[tuple[int, int, int]] = field(default_factory=list)  # round, device, new level (-1: too small for any)
    joined: list[int] = field(default_factory=list)
    _resumed: bool = False

    def level(self, device: int) -> int:
        moved = next((level for _, who, level in reversed(self.moves) if who == device), None)
        return (*self.start, *self.joined)[device] if moved is None else moved

    def move_down(self, device: int, round: int) -> int:
        """The device's new level; -1 where there is no smaller one."""
        level = max(-1, self.level(device) - 1)
        self.moves.append((round, device, level))
        return level

    def at(self, round: int) -> tuple[int, ...]:
        """The level of every device; who is too small for any keeps the smallest, and is not sent anything."""
        if not self._resumed:
            self.moves = [move for move in self.moves if move[0] < round]
            self._resumed = True
        return tuple(max(0, self.level(device)) for device in range(len(self.start) + len(self.joined)))

    def to_json(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "start": list(self.start),
            "joined": list(self.joined),
            "moves": [list(move) for move in self.moves],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Assignment:
        try:
            moves = [(int(round), int(device), int(level)) for round, device, level in values["moves"]]
            joined = list(map(int, values.get("joined", ())))
            return cls(tuple(map(int, values["levels"])), tuple(map(int, values["start"])), moves, joined)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"the run's fleet.json cannot be read: {error!r}") from None


def per_device(method: Method, base: Method, levels: Sequence[int]) -> Method:
    """`method` with a level for each device, in order. `base` was made for the distinct levels, ascending."""
    plan = getattr(base, "plan", None)
    if plan is not None:
        if not plan.levels:
            return method
        slt: SLT = method  # type: ignore[assignment]  # the one method that has a plan
        return replace(slt, plan=replace(slt.plan, levels=tuple(plan.levels[level] for level in levels)))
    if isinstance(method, Levels) and isinstance(base, Levels) and len(base.constraints) > 1:
        executions = tuple(base.executions[level] for level in levels) if base.executions else ()
        constraints = tuple(base.constraints[level] for level in levels)
        return replace(method, constraints=constraints, executions=executions)
    return method
