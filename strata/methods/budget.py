"""What a run knows of its devices before there is a method: each method makes its own setting of it (from_budget).

All that counts bytes for this is here, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.execution import Execution, memory
from strata.planning import plan
from strata.planning.widths import largest_scale

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.planning import Plan


@dataclass(frozen=True)
class Budget:
    """`constraints` are width ratios, `sizes` bytes: one of them, or neither; several are levels of devices, dealt
    round. `options` are those of the method's card that were asked for."""

    execution: Execution
    constraints: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    rounds: int = 500
    seed: int = 0
    accounting: str | None = None  # None: paper for constraints, peak for bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None  # for a plan
    reserve: str | None = None  # "scratch": what libraries take has to be within `sizes` too

    def need(self, graph: ChannelGraph, cut: Cut) -> int:
        """Bytes of a device's step."""
        accounting = self.accounting or ("paper" if self.constraints else "peak")
        return memory(graph, cut, self.execution, accounting).total

    def limits(self, graph: ChannelGraph) -> tuple[int, ...]:
        """Bytes of each level: a constraint means what the model scaled to that width needs."""
        return self.sizes or tuple(self.need(graph, graph.prefix(scale)) for scale in self.constraints)

    def widest(self, graph: ChannelGraph, size: int) -> float:
        """The largest width ratio that trains within so many bytes."""
        return largest_scale(graph, size, self.execution, self.accounting or "peak")

    def plan(self, graph: ChannelGraph) -> Plan:
        levels: dict[str, Any] = {"budget": self.sizes} if self.sizes else {"constraint": self.constraints}
        return plan(
            graph,
            execution=self.execution,
            **levels,
            rounds=self.rounds,
            accounting=self.accounting,
            name=self.model_name,
            reserve=self.reserve,
            **self.options,
        )
