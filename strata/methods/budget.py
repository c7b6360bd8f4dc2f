"""What a run knows of its devices before there is a method: each method makes its own setting of it (from_budget).

All that counts bytes for this is here, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.execution import Execution
from strata.planning import plan
from strata.planning.choosing import Ceilings, Chooser
from strata.planning.executions import candidates
from strata.planning.widths import widest

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.methods.base import Method
    from strata.planning import Plan


@dataclass(frozen=True)
class Budget:
    """`constraints` are width ratios, `sizes` bytes: one of them, or neither; several are levels of devices, dealt
    round. `options` are those of the method's card that were asked for. `lean`: bytes are held against the cheapest
    execution that fits, among all that planning/executions.py lists for `execution`."""

    execution: Execution
    constraints: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    rounds: int = 500
    seed: int = 0
    accounting: str | None = None  # None: paper for constraints, peak for bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None  # for a plan
    reserve: str | None = None  # "scratch": what libraries take has to be within `sizes` too
    lean: bool = False
    ceilings: Ceilings = Ceilings()
    pretrained: bool = False  # the model's weights are trained ones
    gradients_wait: bool = False  # for each other: none may be released as it is made
    # what was found out so far, by graph: budgets that are made of this one share it
    _choosers: dict[tuple[str, bool, bool], Chooser] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lean and self.ceilings != Ceilings():
            raise BadInput("ceilings beside memory are for lean execution: give lean with them")
        if self.lean and (not self.sizes or self.accounting == "paper"):
            raise BadInput(
                "lean chooses how steps are executed by the bytes that they take: give a budget, such as 24MiB, "
                "counted by peak"
            )

    def with_execution(self, execution: Execution) -> Budget:
        return replace(self, execution=execution, _choosers={})

    def of(self, method: type[Method]) -> Budget:
        """The same for devices that train by this method."""
        return replace(self, gradients_wait=method.gradients_wait(self))

    def chooser(self, graph: ChannelGraph) -> Chooser:
        """Which executions there are, and what each takes."""
        key = (graph.hash, self.lean, self.gradients_wait)
        if key not in self._choosers:
            executions = (
                candidates(graph, self.execution, self.ceilings.norm_samples) if self.lean else (self.execution,)
            )
            if self.gradients_wait:
                executions = tuple(one for one in executions if not one.release_gradients or one == self.execution)
            accounting = self.accounting or ("paper" if self.constraints else "peak")
            self._choosers[key] = Chooser(graph, executions, accounting, self.ceilings)
        return self._choosers[key]

    def need(self, graph: ChannelGraph, cut: Cut) -> int:
        """Bytes of a device's step."""
        return self.chooser(graph).least(cut)

    def fits(self, graph: ChannelGraph, cut: Cut, size: int) -> bool:
        """Whether a device of so many bytes can train the cut, by any execution that is open to it."""
        return self.chooser(graph).fits(cut, size)

    def limits(self, graph: ChannelGraph) -> tuple[int, ...]:
        """Bytes of each level: a constraint means what the model scaled to that width needs."""
        return self.sizes or tuple(self.need(graph, graph.prefix(scale)) for scale in self.constraints)

    def widest(self, graph: ChannelGraph, size: int) -> float:
        """The largest width ratio that trains within so many bytes."""
        return widest(self.chooser(graph), size)

    def executions_for(self, method: Method) -> tuple[Execution | None, ...]:
        """The cheapest for each level of a method; None where that is the run's own."""
        if not self.lean:
            return ()
        found = tuple(self._execution_for(method, level, size) for level, size in enumerate(self.sizes))
        return found if any(found) else ()

    def _execution_for(self, method: Method, level: int, size: int) -> Execution | None:
        chosen = self.chooser(method.graph).cheapest(partial(method.most_bytes_at, level), size)
        return None if chosen is None or chosen == self.execution else chosen.alone

    def plan(self, graph: ChannelGraph) -> Plan:
        levels: dict[str, Any] = {"budget": self.sizes} if self.sizes else {"constraint": self.constraints}
        return plan(
            graph,
            execution=self.execution,
            **levels,
            rounds=self.rounds,
            accounting=self.accounting,
            name=self.model_name,
            lean=self.lean,
            chooser=self.chooser(graph) if self.lean else None,
            reserve=self.reserve,
            **self.options,
        )
