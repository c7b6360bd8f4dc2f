"""Is a plan true? Every configuration really trains, in a process of its own; with a hard cap, under a kernel limit.

A child process with a fixed environment (one thread, one heap, big blocks from mmap) makes the model by its name and
forks once per trial. A trial under the cap gets RLIMIT_DATA = what its process holds before training, without the
submodel's tensors, + the budget + a margin. The margin is for what no tensor accounts for: library scratch and the
interpreter's own objects. It is a tenth of the full model's bytes, and the full model has to die under the same cap.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strata.core.importing import child_command
from strata.graph.inputs import input_json
from strata.planning.runtime import child_environment

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut, InputSpec
    from strata.planning.plans import Plan

MARGIN = 0.10  # of the full model's bytes
FULL = -1  # the whole model, in place of a step's number


@dataclass(frozen=True)
class Configuration:
    """What a device trains in a step, and how. `step` is FULL for the whole model."""

    step: int
    cut: Cut
    execution: Execution
    level: int = 0  # of devices
    k_frozen: int | None = None  # of SLT's plans, as the next two
    k_trained: int | None = None
    scale: float | None = None

    def to_json(self) -> dict[str, Any]:
        own = {"step": self.step, "k_frozen": self.k_frozen, "k_trained": self.k_trained, "scale": self.scale}
        level = {"level": self.level} if self.level else {}
        return {"trial": own | level, "cut": self.cut.to_json(), "execution": asdict(self.execution)}


@dataclass(frozen=True)
class Claim:
    """What the configurations were made for: under a cap they have to live, and what needs `full_bytes` has to die."""

    budget_bytes: int
    full_bytes: int

    @property
    def margin_bytes(self) -> int:
        return int(MARGIN * self.full_bytes)


@dataclass(frozen=True)
class Trial:
    """One configuration, trained for real. `step` is FULL for the whole model."""

    step: int
    k_frozen: int | None
    k_trained: int | None
    scale: float | None
    predicted_bytes: int  # by peak accounting
    measured_bytes: int | None  # live tensor bytes at the highest moment; None where the trial failed
    scratch_bytes: int | None  # what oneDNN took on top
    error: str | None = None
    cap_bytes: int | None = None  # RLIMIT_DATA; only with a hard cap
    baseline_bytes: int | None = None
    lived: bool | None = None
    died_of: str | None = None
    level: int = 0

    @property
    def difference(self) -> float | None:
        """How far the prediction lies above what was measured, as a share of it."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1

    @property
    def name(self) -> str:
        if self.step == FULL:
            return "whole"
        return f"{self.step}, level {self.level}" if self.level else str(self.step)

    @property
    def holds(self) -> bool:
        """It trained; and under a cap a step lived, or the whole model died."""
        return self.measured_bytes is not None and (self.lived is None or self.lived == (self.step != FULL))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": "whole" if self.step == FULL else self.step}


def verify(
    plan: Plan,
    model: str,
    classes: int | None,
    hard_cap: bool = False,
    objective: str | None = None,
    vocabulary: int | None = None,
) -> Iterator[Trial]:
    """One Trial per step, then the whole model, as they finish. `model` is its name, as `strata plan --model` takes,
    and `objective` what it is to learn, where it has no head of its own."""
    tried = [
        Configuration(one.step, plan.cut(number), plan.execution_at(number), 0, one.k_frozen, one.k_trained, one.scale)
        for number, one in enumerate(plan.steps)
    ]
    if len(tried) > 1:  # otherwise the plan itself is the whole model
        tried.append(Configuration(FULL, plan.graph.full(), plan.execution, 0, 0, 0, 1.0))
    request = request_of(plan.graph, plan.input_shape, model, classes, objective, vocabulary)
    return trials_of(tried, claim_of(plan) if hard_cap else None, request)


def claim_of(plan: Plan) -> Claim:
    return Claim(plan.budget_bytes, plan.full_bytes)


def request_of(
    graph: ChannelGraph,
    inputs: tuple[int, ...] | InputSpec,
    model: str,
    classes: int | None,
    objective: str | None,
    vocabulary: int | None = None,
) -> dict[str, Any]:
    """From what the child makes the graph again."""
    return {
        "model": model,
        "classes": classes,
        "vocabulary": vocabulary,
        "input": input_json(inputs),
        "task": objective or "classification",
        "width": graph.width,
    }


def trials_of(
    configurations: Sequence[Configuration],
    claim: Claim | None,
    request: Mapping[str, Any],
    module: str = "strata.planning.trials",
) -> Iterator[Trial]:
    """A Trial of each, as they finish; with a claim under its cap. `module` is the child's program."""
    allowance = None if claim is None else claim.budget_bytes + claim.margin_bytes
    tried = [one.to_json() for one in configurations]
    child = subprocess.Popen(
        child_command(module), env=child_environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        json.dump({**request, "configurations": tried, "allowance": allowance}, child.stdin)
        child.stdin.close()
        for line in child.stdout:
            yield Trial(**json.loads(line))
        if child.wait():
            raise RuntimeError(f"the verifying process ended with code {child.returncode}; its error is above")
    finally:
        child.kill()
        child.wait()
