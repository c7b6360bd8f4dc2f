"""Outline: what a method's devices train in which rounds, and what that takes; of methods without a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.sizes import show_bytes
from strata.execution import Execution, flops, memory, state_bytes, traffic
from strata.planning.plans import kept_note
from strata.planning.verify import FULL, Claim, Configuration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.methods.base import Method, Phase, Task


@dataclass(frozen=True)
class Stage:
    """A step of a method, of the devices of one level. `k_frozen` and `k_trained`: between them are all layers of which
    something is trained; with them, in every stage, the classifier."""

    step: int
    level: int
    k_frozen: int
    k_trained: int
    memory_bytes: int
    trained_parameters: int
    upload_bytes: int
    train_flops_per_sample: int
    until_round: int | None  # None: it comes again
    execution: dict[str, Any]  # where it differs from the run's
    kept_bytes_per_sample: int = 0  # on the device's disk, of what frozen layers put out

    @property
    def layers(self) -> str:
        low, high = self.k_frozen + 1, self.k_trained
        return "none" if low > high else f"{low}" if low == high else f"{low}-{high}"


@dataclass(frozen=True)
class Outline:
    model: str
    method: str
    setting: str
    classes: int
    input: str
    batch: int
    layers: int
    budget_bytes: int | None
    full_bytes: int
    stages: tuple[Stage, ...]

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if key != "stages"}
        return {**values, "feasible": True, "steps": [asdict(stage) for stage in self.stages]}

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" within {show_bytes(self.budget_bytes)}"
        levels = len({stage.level for stage in self.stages}) > 1
        lines = [
            f"{self.method} of {self.model}{budget}: {self.setting} (the whole model has {self.layers} layers and a "
            f"classifier, and takes {show_bytes(self.full_bytes)})",
            "",
            f"{'step':>5}{' level' if levels else ''} {'layers':>8} {'rounds until':>13} {'memory':>11} "
            f"{'trained':>10} {'upload':>11}  executed",
        ]
        for one in self.stages:
            level = f" {one.level:>5}" if levels else ""
            until = "in turn" if one.until_round is None else str(one.until_round)
            how = ", ".join(f"{name} {value}" for name, value in one.execution.items()) or "plainly"
            lines.append(
                f"{one.step:>5}{level} {one.layers:>8} {until:>13} {show_bytes(one.memory_bytes):>11} "
                f"{one.trained_parameters:>10} {show_bytes(one.upload_bytes):>11}  {how}"
            )
        kept = max(stage.kept_bytes_per_sample for stage in self.stages)
        if kept:
            lines += ["", kept_note(kept)]
        return "\n".join(lines)


def outline(method: Method, execution: Execution, rounds: int, name: str, budget: int | None = None) -> Outline:
    graph = method.graph
    return Outline(
        name,
        method.name,
        method.setting,
        graph.classes,
        str(graph.inputs),
        execution.batch_size,
        graph.depth,
        budget,
        memory(graph, graph.full(), execution).total,
        tuple(_stage(method, execution, *one) for one in _played(method, rounds)),
    )


def configurations(method: Method, execution: Execution, rounds: int, claim: Claim | None) -> list[Configuration]:
    """What devices train, phase by phase, to be verified; after it the whole model, plainly, where it has to die."""
    graph = method.graph
    found = [
        Configuration(step, phase.cut, phase.execution or execution, task.device)
        for step, _, task in _played(method, rounds)
        for phase in task.phases
        if _has_one_cut(method, phase)
    ]
    whole = memory(graph, graph.full(), execution).total
    if claim is not None and whole > claim.budget_bytes + claim.margin_bytes:
        found.append(Configuration(FULL, graph.full(), execution))
    return found


def _has_one_cut(method: Method, phase: Phase) -> bool:
    if phase.levels:
        raise BadInput(
            f"--verify trains one cut at a time, and devices of {method.name} change among {len(phase.levels)} within "
            "a round: leave it out; a run measures what they take"
        )
    return True


def _played(method: Method, rounds: int) -> Iterator[tuple[int, list[int], Task]]:
    """Of every step the rounds in which it is played, and a task of each level."""
    steps: dict[int, list[int]] = {}
    for round in range(rounds):
        steps.setdefault(method.step(round), []).append(round)
    for step, played in steps.items():
        for task in method.assign(played[0], range(method.period or 1)):
            yield step, played, task


def _stage(method: Method, execution: Execution, step: int, played: list[int], task: Task) -> Stage:
    graph, cut = method.graph, task.cut
    without_break = played[-1] - played[0] + 1 == len(played)
    executions = [phase.execution or execution for phase in task.phases]
    memories = [memory(graph, phase.cut, one) for phase, one in zip(task.phases, executions, strict=True)]
    # the submodels of smaller levels stay beside the largest
    beside = [sum(state_bytes(graph, level) for level in phase.levels[:-1]) for phase in task.phases]
    costs = [one.total + more for one, more in zip(memories, beside, strict=True)]
    layers = [graph.layer_of[name] for name in cut.trained if graph.layer_of[name] <= graph.depth]
    return Stage(
        step,
        task.device,
        min(layers, default=graph.depth + 1) - 1,
        max(layers, default=graph.depth),
        max(costs),
        sum(prod(cut.shapes[name]) for name in cut.trained),
        traffic(graph, cut).upload,
        sum(flops(graph, phase.cut, one).real_train for phase, one in zip(task.phases, executions, strict=True)),
        played[-1] + 1 if without_break else None,
        executions[costs.index(max(costs))].differences(execution),
        max(one.kept for one in memories),
    )
