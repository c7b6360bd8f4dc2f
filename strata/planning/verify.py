"""Is a plan true? Every configuration really trains, in a process of its own; with a hard cap, under a kernel limit.

A child process with a fixed environment (one thread, one heap, big blocks from mmap) makes the model by its name and
forks once per trial. A trial under the cap gets RLIMIT_DATA = what its process holds before training, without the
submodel's tensors, + the budget + a margin. The margin is for what no tensor accounts for: library scratch and the
interpreter's own objects. It is a tenth of the full model's bytes, and the full model has to die under the same cap.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strata.core.importing import child_command
from strata.graph.inputs import input_json
from strata.planning.runtime import child_environment

if TYPE_CHECKING:
    from strata.planning.plans import Plan

MARGIN = 0.10  # of the full model's bytes
FULL = -1  # the whole model, in place of a step's number


@dataclass(frozen=True)
class Trial:
    """One configuration, trained for real. `step` is FULL for the whole model."""

    step: int
    k_frozen: int
    k_trained: int
    scale: float
    predicted_bytes: int  # by peak accounting
    measured_bytes: int | None  # live tensor bytes at the highest moment; None where the trial failed
    scratch_bytes: int | None  # what oneDNN took on top
    error: str | None = None
    cap_bytes: int | None = None  # RLIMIT_DATA; only with a hard cap
    baseline_bytes: int | None = None
    lived: bool | None = None
    died_of: str | None = None

    @property
    def difference(self) -> float | None:
        """How far the prediction lies above what was measured, as a share of it."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def name(self) -> str:
        return "whole" if self.step == FULL else str(self.step)

    @property
    def holds(self) -> bool:
        """It trained; and under a cap a step lived, or the whole model died."""
        return self.measured_bytes is not None and (self.lived is None or self.lived == (self.step != FULL))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": "whole" if self.step == FULL else self.step}


def verify(
    plan: Plan, model: str, classes: int | None, hard_cap: bool = False, objective: str | None = None
) -> Iterator[Trial]:
    """One Trial per step, then the whole model, as they finish. `model` is its name, as `strata plan --model` takes,
    and `objective` what it is to learn, where it has no head of its own."""
    steps = [
        (s.step, s.k_frozen, s.k_trained, s.scale, asdict(plan.execution_at(number)))
        for number, s in enumerate(plan.steps)
    ]
    if len(steps) > 1:  # otherwise the plan itself is the whole model
        steps.append((FULL, 0, 0, 1.0, asdict(plan.execution)))
    request = {
        "model": model, "classes": classes, "input": input_json(plan.input_shape),
        "hard_cap": hard_cap, "allowance": plan.budget_bytes + margin_bytes(plan),
        "steps": steps, "task": objective or "classification", "width": plan.graph.width,
    }  # fmt: skip
    child = subprocess.Popen(
        child_command("strata.planning.trials"), env=child_environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdin is not None and child.stdout is not None
        json.dump(request, child.stdin)
        child.stdin.close()
        for line in child.stdout:
            yield Trial(**json.loads(line))
        if child.wait():
            raise RuntimeError(f"the verifying process ended with code {child.returncode}; its error is above")
    finally:
        child.kill()
        child.wait()


def margin_bytes(plan: Plan) -> int:
    return int(MARGIN * plan.full_bytes)
