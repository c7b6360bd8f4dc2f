"""Planning: a budget to steps (search), steps to rounds (schedules). `plan(...)` is the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.planning.infeasible import PlanInfeasible
from strata.planning.plans import Level, Plan, Step
from strata.planning.schedules import SCHEDULES

if TYPE_CHECKING:
    from strata.planning.make import plan

__all__ = ["SCHEDULES", "Level", "Plan", "PlanInfeasible", "Step", "plan"]


def __getattr__(name: str) -> Any:
    if name == "plan":  # imports torch: not for `strata --help`
        from strata.planning.make import plan

        return plan
    raise AttributeError(f"module 'strata.planning' has no attribute {name!r}")
