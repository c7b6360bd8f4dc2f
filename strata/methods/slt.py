"""Successive Layer Training: layers 1..k_frozen frozen, up to k_trained trained in full, a thin head above them.

Pfeiffer et al., "Aggregating Capacity in FL through Successive Layer Training for Computationally-Constrained
Devices", NeurIPS 2023. The Plan says which (k_frozen, k_trained, scale) fits the budget at each step, and in which
round the next step begins; the weakest level fixes the scale, a stronger device freezes fewer layers. The current
submodel is evaluated: the full model once the scale is 1.

Schedule early-stopping: the next step begins when the accuracy has not exceeded the best of its step for `patience`
rounds. (The best is the step's own: new head channels start untrained, so a step may open below its predecessor.)
What they start from is `fill`: as published, the values that the whole model was initialised with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.core.settings import Setting
from strata.graph.filling import filled
from strata.methods.aggregate import MeanOverAll
from strata.methods.base import Method
from strata.methods.card import Card
from strata.planning.schedules import AVERAGINGS, DEFAULT_PATIENCE, FILLS, SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor

    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut
    from strata.methods.aggregate import Aggregate
    from strata.methods.budget import Budget
    from strata.planning import Plan


@dataclass(frozen=True)
class Progress:
    """Early stopping so far."""

    starts: tuple[int, ...] = (0,)  # the first round of each step reached
    best: float | None = None  # in the current step
    rounds_since_best: int = 0

    def after(self, round: int, accuracy: float, patience: int, last_step: int) -> Progress:
        if self.best is None or accuracy > self.best:
            return replace(self, best=accuracy, rounds_since_best=0)
        waited = self.rounds_since_best + 1
        if waited < patience or len(self.starts) > last_step:
            return replace(self, rounds_since_best=waited)
        return Progress(starts=(*self.starts, round + 1))


@dataclass(frozen=True)
class SLT(Method):
    needs_budget = True
    card = Card(
        "slt",
        label="SLT",
        colour="#e07a10",
        trains="one layer after another at full width, with the layers below frozen and a thin head above",
        evaluates="the current submodel",
        levels="weakest fixes the head's width, stronger devices freeze fewer layers",
        paper="Pfeiffer et al., Aggregating Capacity in FL through Successive Layer Training, NeurIPS 2023",
        options={
            "schedule": Setting("when the next step begins", metavar="NAME", choices=tuple(SCHEDULES)),
            "patience": Setting(
                f"schedule early-stopping: rounds without a better accuracy (default {DEFAULT_PATIENCE})",
                metavar="N",
                least=1,
                whole=True,
            ),
            "head_fraction": Setting("the head uses this share of its width", metavar="F", above=0),
            "averaging": Setting(
                "with levels: over those who trained a layer, or over all, as in the authors' runs",
                metavar="OVER",
                choices=AVERAGINGS,
            ),
            "fill": Setting("starting values of new channels", metavar="NAME", choices=FILLS),
        },
        needs_plan=True,
    )
    graph: ChannelGraph = field(init=False)
    plan: Plan
    progress: Progress = Progress()
    fill: str = field(default="published", metadata={"since": 2})  # new channels at a step change (graph/filling.py)
    seed: int = field(default=0, metadata={"since": 2})  # of fill's shares, where it draws any
    averaging: str = field(default="trained", metadata={"since": 2})

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", self.plan.graph)
        if self.fill not in FILLS:
            raise BadInput(f"the fill of slt is one of {', '.join(FILLS)}, not {self.fill!r}")
        if self.averaging not in AVERAGINGS:
            raise BadInput(f"the averaging of slt is one of {', '.join(AVERAGINGS)}, not {self.averaging!r}")

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        planned = dict(budget.options)
        own = {name: planned.pop(name) for name in ("fill", "averaging") if name in planned}
        seed = budget.seed if own.get("fill") == "copies" else 0
        return cls(replace(budget, options=planned).plan(graph), seed=seed, **own)

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        """More than the prefix model after which a constraint is named, perhaps: a plan by the paper's accounting may
        use what that does not count."""
        return self.most_executed(lambda cut, _: count(cut))

    def most_executed(self, count: Callable[[Cut, Execution | None], int]) -> list[int]:
        levels = range(len(self.plan.levels)) if self.plan.levels else (None,)
        steps = range(len(self.plan.steps))
        return [max(count(self.plan.cut(step, one), self._execution(step, one)) for step in steps) for one in levels]

    @property
    def setting(self) -> str:
        return "one step" if len(self.plan.steps) == 1 else f"{len(self.plan.steps)} steps"

    def executed(self, budget: Budget) -> Self:
        """The plan says it for each step."""
        return self

    def execution_for(self, round: int, device: int) -> Execution | None:
        levels = len(self.plan.levels)
        return self._execution(self.step(round), device % levels if levels else None)

    def _execution(self, step: int, level: int | None) -> Execution | None:
        """None: the run's own."""
        chosen = self.plan.execution_at(step, level)
        return None if chosen == self.plan.execution else chosen

    @property
    def _stops_early(self) -> bool:
        return self.plan.schedule == "early-stopping"

    @property
    def needs_accuracy(self) -> bool:
        """Until the last step is reached: after it there is nothing to decide."""
        return self._stops_early and len(self.progress.starts) < len(self.plan.steps)

    def step(self, round: int) -> int:
        if self._stops_early:
            return bisect_right(self.progress.starts, round) - 1
        return self.plan.step_at(round).step

    @property
    def period(self) -> int | None:
        return max(1, len(self.plan.levels))

    def cut_for(self, round: int, device: int) -> Cut:
        levels = len(self.plan.levels)
        return self.plan.cut(self.step(round), level=device % levels if levels else None)

    def begin(self, round: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """At the beginning and at a step change: the values that new channels start from."""
        now, last = self.step(round), self.step(round - 1) if round else None
        if self.fill == "published" or now == last:
            return tensors
        before = None if last is None else self.plan.cut(last)
        return filled(self.graph, self.fill, before, self.plan.cut(now), tensors, generator(self.seed, "fill", now))

    @property
    def aggregates(self) -> bool:
        return self.averaging == "all"

    def aggregation(self, round: int, tensors: Mapping[str, Tensor]) -> Aggregate | None:
        return MeanOverAll(tensors) if self.aggregates else None

    def evaluation_cut(self, round: int) -> Cut:
        return self.plan.cut(self.step(round))

    def observe(self, round: int, accuracy: float) -> Self:
        if not self.needs_accuracy:
            return self
        after = self.progress.after(round, accuracy, self.plan.patience, last_step=len(self.plan.steps) - 1)
        return replace(self, progress=after)

    @property
    def state(self) -> dict[str, Any]:
        if not self._stops_early:
            return {}
        progress = self.progress
        return {"starts": list(progress.starts), "best": progress.best, "rounds_since_best": progress.rounds_since_best}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        if not self._stops_early:
            return self
        try:
            progress = Progress(tuple(map(int, state["starts"])), state["best"], int(state["rounds_since_best"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"the saved state of early stopping cannot be read: {dict(state)!r}") from error
        return replace(self, progress=progress)
