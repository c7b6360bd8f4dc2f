"""Which of several executions trains a cut within so many bytes, and how wide a model can be. Remembered: every method
asks, and often the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from strata.core.sizes import show_bytes
from strata.execution import flops, memory, traffic
from strata.execution.placement import placement_for
from strata.planning.executions import leaner

if TYPE_CHECKING:
    from strata.execution import Execution, Memory
    from strata.execution.segments import Placement
    from strata.graph import ChannelGraph, Cut

CAUTION = 0.8  # of how activations grow with the samples at a time: where to recompute may change


@dataclass(frozen=True)
class Ceilings:
    """Limits beside bytes of memory; None: there is none (of samples: executions.FEWEST_NORMED)."""

    flops: float | None = None  # of a training step, per sample, in units of the whole model's plain one
    upload: int | None = None  # bytes per device and round
    norm_samples: int | None = None  # that are taken at a time, at least, where they meet in a batch norm

    def __str__(self) -> str:
        flops = [] if self.flops is None else [f"{self.flops:g} times the FLOPs of plain training"]
        upload = [] if self.upload is None else [f"{show_bytes(self.upload)} of upload a round"]
        samples = [] if self.norm_samples is None else [f"{self.norm_samples} samples in a batch norm"]
        return " and ".join([*flops, *upload, *samples])


class Chooser:
    """`executions`: the cheapest first (executions.py)."""

    def __init__(
        self,
        graph: ChannelGraph,
        executions: Sequence[Execution],
        accounting: str = "peak",
        ceilings: Ceilings | None = None,
    ) -> None:
        self.graph, self.executions, self.accounting = graph, tuple(executions), accounting
        self.ceilings = ceilings or Ceilings()
        # if none of these fits, none does; those of the fewest samples first, as they bound the others
        self._leanest = [
            one for one in self.executions if not any(other != one and leaner(other, one) for other in self.executions)
        ]
        self._leanest.sort(key=lambda one: one.at_once)
        plain = [one for one in self.executions if one.activation_checkpointing is None]
        self._quick = plain and [min(plain, key=lambda one: one.at_once)]
        self._sample_bytes = graph.inputs.sample_bytes
        self._memory: dict[tuple[Cut, Execution], Memory] = {}
        self._placements: dict[Hashable, Placement | None] = {}
        self._flops: dict[tuple[Cut, Execution], int] = {}
        most = self.ceilings.flops
        self._most_flops = None if most is None else most * flops(graph, graph.full()).real_train

    def memory(self, cut: Cut, execution: Execution) -> Memory:
        key = self._key(cut, execution)
        if key not in self._memory:
            self._memory[key] = memory(self.graph, cut, key[1], self.accounting, self._placed)
        return self._memory[key]

    def _placed(self, cut: Cut, execution: Execution) -> Placement | None:
        """Finding where to recompute is the slow part, and where gradients go changes nothing in it."""
        key = cut, execution.activation_checkpointing, execution.at_once, execution.frozen_chunk
        if key not in self._placements:
            self._placements[key] = placement_for(self.graph, cut, execution)
        return self._placements[key]

    def flops(self, cut: Cut, execution: Execution) -> int:
        """Of a training step, per sample."""
        key = (cut, execution)
        if key not in self._flops:
            self._flops[key] = flops(self.graph, cut, execution).real_train
        return self._flops[key]

    def allows(self, cut: Cut, execution: Execution) -> bool:
        """Whether it is within the ceilings beside memory."""
        upload = self.ceilings.upload
        if upload is not None and traffic(self.graph, cut).upload > upload:
            return False
        return self._most_flops is None or self.flops(cut, execution) <= self._most_flops

    def fits(self, cut: Cut, budget: int) -> bool:
        """Whether any execution does."""
        # levers that save nothing in a small network may cost a little: what was asked for is tried too
        if not any(self._within(cut, one, budget) for one in (self.executions[0], *self._quick, *self._leanest)):
            return False
        return self.ceilings == Ceilings() or self.fitting(cut, budget) is not None

    def fitting(self, cut: Cut, budget: int) -> Execution | None:
        """The cheapest execution that trains the cut within `budget` bytes."""
        first = self.executions[0]
        if self._within(cut, first, budget) and self.allows(cut, first):
            return first
        if len(self.executions) > 1 and not any(self._within(cut, one, budget) for one in self._leanest):
            return None
        for _, group in groupby(self.executions, key=lambda one: one.at_once):
            alike = list(group)
            leanest = [one for one in alike if not any(other != one and leaner(other, one) for other in alike)]
            if len(alike) > 2 and not any(self._within(cut, one, budget) for one in leanest):
                continue
            for one in alike:
                if self._within(cut, one, budget) and self.allows(cut, one):
                    return one
        return None

    def cheapest(self, most: Callable[[Callable[[Cut], int]], int], budget: int) -> Execution | None:
        """The same for what is made of several cuts: `most` says what it takes, given what a cut does."""
        for one in self.executions:
            asked: list[Cut] = []

            def count(cut: Cut, one: Execution = one, asked: list[Cut] = asked) -> int:
                asked.append(cut)
                bound = self._at_least(cut, one)
                return bound if bound > budget else self.memory(cut, one).total

            if most(count) <= budget and all(self.allows(cut, one) for cut in asked):
                return one
        return None

    def least(self, cut: Cut) -> int:
        """The fewest bytes in which any execution trains the cut; ceilings are another matter."""
        return min(self.memory(cut, one).total for one in self._leanest)

    @staticmethod
    def _key(cut: Cut, execution: Execution) -> tuple[Cut, Execution]:
        """Without what changes nothing: chunks of a frozen part that is not there."""
        nothing = not cut.frozen and execution.frozen_chunk is not None
        return cut, replace(execution, frozen_chunk=None) if nothing else execution

    def _within(self, cut: Cut, execution: Execution, budget: int) -> bool:
        return self._at_least(cut, execution) <= budget and self.memory(cut, execution).total <= budget

    def _at_least(self, cut: Cut, execution: Execution) -> int:
        """A lower bound from what is known already: finding where to recompute is the slow part, and activations grow
        with the samples at a time. The rest of a step stays, and so do samples that wait."""
        if execution.activation_checkpointing is None:
            return 0
        if self._key(cut, execution) in self._memory:
            return 0
        for one in self._leanest:
            known = self._memory.get(self._key(cut, one))
            if known is None or one.activation_checkpointing is None or one.at_once >= execution.at_once:
                continue
            growing = max(0, known.activations - execution.batch_size * self._sample_bytes)
            more = CAUTION * growing * (execution.at_once / one.at_once - 1)
            return int(known.total - known.gradients + more)
        return 0
