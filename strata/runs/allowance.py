"""What devices may hold, by the budget that a run was given: measured peaks are held against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.core.sizes import show_bytes
from strata.execution import memory
from strata.methods.base import Levels

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.methods import Method

OVER = "over_budget_bytes"  # a key of metrics.jsonl, in rounds where a device took more than it may


@dataclass(frozen=True)
class Allowance:
    """Bytes of each level; device d is of level d % len(sizes). Only where they are counted as `peak` counts them can
    they be held against what is measured: the paper's count leaves out much of what a step takes."""

    sizes: tuple[int, ...]
    accounting: str

    @classmethod
    def of(
        cls,
        method: Method,
        execution: Execution,
        budgets: Sequence[int] = (),
        constraints: Sequence[float] = (),
        accounting: str | None = None,
    ) -> Allowance | None:
        """None where devices may hold whatever the method takes."""
        plan = getattr(method, "plan", None)
        if plan is not None:
            return cls(tuple(level.budget_bytes for level in plan.levels or (plan,)), plan.accounting)
        if budgets:
            return cls(tuple(budgets), accounting or "peak")
        if not constraints and isinstance(method, Levels):
            constraints = method.constraints
        if not constraints or min(constraints) >= 1:
            return None
        by, graph = accounting or "paper", method.graph
        return cls(tuple(memory(graph, graph.prefix(ratio), execution, by).total for ratio in constraints), by)

    @property
    def measurable(self) -> bool:
        return self.accounting == "peak"

    def of_device(self, device: int) -> int:
        return self.sizes[device % len(self.sizes)]

    def excess(self, peaks: Mapping[int, int]) -> tuple[int, int]:
        """Of the measured peaks of devices: who took most above its budget, and by how many bytes (0: nobody did)."""
        over = {device: peak - self.of_device(device) for device, peak in peaks.items()} if self.measurable else {}
        worst = max(over, key=over.__getitem__, default=-1)
        return worst, max(0, over.get(worst, 0))

    def to_json(self, over: int) -> dict[str, Any]:
        """For summary.json. `over` says nothing where the accounting is another than what is measured."""
        sizes = list(dict.fromkeys(self.sizes))
        return {"bytes": sizes, "accounting": self.accounting, "over_bytes": over if self.measurable else None}


def warning(round: int, device: int, peak: int, over: int) -> str:
    return (
        f"WARNING: over the budget. In round {round} device {device} took {show_bytes(peak)} of tensors (measured), "
        f"{show_bytes(over)} more than the {show_bytes(peak - over)} it may hold; a device with no more memory than "
        "that would have died here"
    )


def verdict(summary: Mapping[str, Any]) -> str:
    """On a finished run's largest device, from its summary: within the budget, or by how much not."""
    budget = summary.get("budget")
    if not isinstance(budget, Mapping):
        return ""
    sizes = " / ".join(show_bytes(size) for size in budget["bytes"])
    if budget["over_bytes"] is None:
        return f"budget {sizes} by the {budget['accounting']}'s count, which is not true bytes"
    if budget["over_bytes"]:
        return f"OVER THE BUDGET of {sizes} by {show_bytes(budget['over_bytes'])}"
    return f"within the budget of {sizes}"
