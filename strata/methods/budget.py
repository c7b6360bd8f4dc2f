"""What a run knows of its devices before there is a method: each method makes its own setting of it (from_budget).

All that counts bytes for this is here, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from strata.execution import memory
from strata.planning import plan
from strata.planning.widths import largest_scale

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.planning import Plan


class Steps(Protocol):
    """How a device takes a step, as far as its bytes depend on it."""

    @property
    def batch_size(self) -> int: ...
    @property
    def micro_batch(self) -> int | None: ...
    @property
    def activation_checkpointing(self) -> int | str | None: ...
    @property
    def proximal(self) -> float: ...


@dataclass(frozen=True)
class Budget:
    """`constraints` are width ratios, `sizes` bytes: one of them, or neither; several are levels of devices, dealt
    round. `options` are those of the method's card that were asked for."""

    execution: Steps
    constraints: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    rounds: int = 500
    seed: int = 0
    accounting: str | None = None  # None: paper for constraints, peak for bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None  # for a plan

    @property
    def is_measured(self) -> bool:
        """Whether bytes are measured, because no accounting knows how devices train."""
        return self.execution.activation_checkpointing is not None and self.accounting is None

    def need(self, graph: ChannelGraph, cut: Cut) -> int:
        """Bytes of a device's step."""
        how = self.execution
        if self.is_measured:
            from strata.training.memory import measured_bytes
            from strata.training.workspace import Workspace

            return measured_bytes(Workspace(graph), cut, how)  # type: ignore[arg-type]
        accounting = self.accounting or ("paper" if self.constraints else "peak")
        counted = memory(graph, cut, how.batch_size, accounting, micro_batch=how.micro_batch, proximal=how.proximal > 0)
        return counted.total

    def limits(self, graph: ChannelGraph) -> tuple[int, ...]:
        """Bytes of each level: a constraint means what the model scaled to that width needs."""
        return self.sizes or tuple(self.need(graph, graph.prefix(scale)) for scale in self.constraints)

    def widest(self, graph: ChannelGraph, size: int) -> float:
        """The largest width ratio that trains within so many bytes."""
        how = self.execution
        measured = (lambda cut: self.need(graph, cut)) if self.is_measured else None
        return largest_scale(
            graph, size, how.batch_size, self.accounting or "peak", measured, how.micro_batch, how.proximal > 0
        )

    def plan(self, graph: ChannelGraph) -> Plan:
        how = self.execution
        levels: dict[str, Any] = {"budget": self.sizes} if self.sizes else {"constraint": self.constraints}
        return plan(
            graph,
            graph.input_shape,
            how.batch_size,
            **levels,
            rounds=self.rounds,
            accounting=self.accounting,
            name=self.model_name,
            micro_batch=how.micro_batch,
            proximal=how.proximal > 0,
            **self.options,
        )
