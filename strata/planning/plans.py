"""Plan: which part of the model trains in which rounds, within which bytes. A value: printable, JSON, stable hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from strata.core.errors import BadInput
from strata.core.settings import settings_of
from strata.core.sizes import parse_ratio, show_bytes
from strata.execution.execution import Execution
from strata.planning.schedules import DEFAULT_PATIENCE

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from strata.graph import ChannelGraph, Cut
    from strata.graph.inputs import InputSpec

T = TypeVar("T")
IN_SOME_PLANS = ("mapped_bytes", "kept_bytes_per_sample")  # of a step, in JSON where they are not 0


def kept_note(bytes_per_sample: int) -> str:
    return f"On a device's disk: up to {show_bytes(bytes_per_sample)} a sample, of what frozen layers put out."


@dataclass(frozen=True)
class Step:
    """Layers 1..k_frozen frozen, up to k_trained trained at full width, above them a head of width `scale`."""

    step: int
    k_frozen: int
    k_trained: int
    scale: float
    memory_bytes: int
    weights_bytes: int
    gradients_bytes: int
    activations_bytes: int
    trained_parameters: int
    upload_bytes: int
    train_flops_per_sample: int
    until_round: int | None  # exclusive; None: decided in training (early-stopping)
    mapped_bytes: int = 0  # frozen weights in a file, whose pages need not stay in memory: not in memory_bytes
    execution: Execution | None = None  # how it is taken, where that is not the plan's own way
    kept_bytes_per_sample: int = 0  # on the device's disk, of what frozen layers put out


@dataclass(frozen=True)
class Level:
    """A kind of device: the weakest fixes every scale, a stronger one freezes fewer layers."""

    constraint: float | None
    budget_bytes: int
    k_frozen: tuple[int, ...]  # per step
    executions: tuple[Execution | None, ...] = ()  # per step, where each may have its own; None: the plan's


@dataclass(frozen=True)
class Plan:
    model: str
    classes: int
    input_shape: tuple[int, ...] | InputSpec  # a shape where that says it all
    execution: Execution
    accounting: str
    schedule: str
    budget_bytes: int  # the weakest level's
    full_bytes: int
    steps: tuple[Step, ...]
    levels: tuple[Level, ...] = ()  # only for heterogeneous budgets, in the order given
    patience: int = DEFAULT_PATIENCE  # only for early-stopping
    rounds_in_all: int | None = None  # only for early-stopping: elsewhere the end of the last step
    reserve: str | None = None  # "scratch": what libraries take is within the budget, beside the steps' bytes
    graph: ChannelGraph = field(kw_only=True, repr=False, compare=False)

    @property
    def rounds(self) -> int | None:
        return self.steps[-1].until_round or self.rounds_in_all

    @property
    def batch_size(self) -> int:
        return self.execution.batch_size

    @property
    def micro_batch(self) -> int | None:
        return self.execution.micro_batch

    @property
    def batch(self) -> str:
        """For people."""
        return str(self.execution).removeprefix("batch ")

    @property
    def skipped(self) -> tuple[int, ...]:
        """Steps that get no round, because there are few rounds."""
        ends = [0, *(step.until_round or 0 for step in self.steps)]
        return tuple(
            step.step for step in self.steps if step.until_round is not None and step.until_round == ends[step.step]
        )

    def step_at(self, round: int) -> Step:
        """The step of a round (from 0); rounds past the end stay at the last step."""
        if self.schedule == "early-stopping":
            raise ValueError("with early-stopping the step of a round is decided in training")
        if round < 0:
            raise ValueError(f"rounds count from 0, not {round}")
        return next((s for s in self.steps if s.until_round is not None and round < s.until_round), self.steps[-1])

    def cut(self, step: int, level: int | None = None) -> Cut:
        """What a device of this level trains at this step; without a level, the weakest."""
        chosen = self.steps[step]
        k_frozen = chosen.k_frozen if level is None else self.levels[level].k_frozen[step]
        return self.graph.slt(k_frozen, chosen.k_trained, chosen.scale)

    def execution_at(self, step: int, level: int | None = None) -> Execution:
        """How a device of this level takes this step; without a level, the weakest."""
        several = () if level is None else self.levels[level].executions
        own = several[step] if several else self.steps[step].execution
        return own or self.execution

    def to_json(self) -> dict[str, Any]:
        levels = {"levels": [self._level_json(level) for level in self.levels]}
        return {
            **request_json(
                self.model,
                self.classes,
                self.input_shape,
                self.execution,
                self.accounting,
                self.schedule,
                self.budget_bytes,
                self.full_bytes,
            ),
            "feasible": True,
            **({} if self.rounds_in_all is None else {"rounds": self.rounds_in_all}),
            **({} if self.reserve is None else {"reserve": self.reserve}),
            **({} if self.graph.width == "residual" else {"width": self.graph.width}),
            "steps": [self._step_json(step) for step in self.steps],
            **(levels if self.levels else {}),
        }

    def _step_json(self, step: Step) -> dict[str, Any]:
        values = {one.name: getattr(step, one.name) for one in fields(Step) if one.name != "execution"}
        for name in IN_SOME_PLANS:
            if not values[name]:
                del values[name]
        return values if step.execution is None else values | {"execution": self._changes(step.execution)}

    def _level_json(self, level: Level) -> dict[str, Any]:
        values = {
            "constraint": level.constraint, "budget_bytes": level.budget_bytes, "k_frozen": list(level.k_frozen)
        }  # fmt: skip
        return values | ({"executions": list(map(self._changes, level.executions))} if level.executions else {})

    def _changes(self, execution: Execution | None) -> dict[str, Any]:
        """Where it is not as the plan's own."""
        return {} if execution is None else execution.differences(self.execution)

    @staticmethod
    def from_json(data: Any, graph: ChannelGraph, patience: int = DEFAULT_PATIENCE) -> Plan:
        """A plan that to_json wrote, for the model it was made for."""
        from strata.graph.inputs import input_from_json

        try:
            execution = _execution(data)
            plan = Plan(
                model=str(data["model"]),
                classes=int(data["classes"]),
                input_shape=input_from_json(data["input"]),
                execution=execution,
                accounting=str(data["accounting"]),
                schedule=str(data["schedule"]),
                budget_bytes=int(data["budget_bytes"]),
                full_bytes=int(data["full_bytes"]),
                steps=tuple(_step(one, execution) for one in data["steps"]),
                levels=tuple(_level(one, execution) for one in data.get("levels", ())),
                patience=patience,
                rounds_in_all=_maybe(int, data.get("rounds")),
                reserve=_maybe(str, data.get("reserve")),
                graph=graph,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"this is not a plan as `strata plan --json` writes it: {error!r}") from error
        deepest = max((step.k_trained for step in plan.steps), default=graph.depth + 1)
        if plan.classes != graph.classes or plan.input_shape != graph.inputs.plain or deepest > graph.depth:
            raise BadInput("the plan was made for another model, class count or input shape")
        if data.get("width", "residual") != graph.width:
            raise BadInput("the plan was made for another width: make the ChannelGraph with the plan's")
        for frozen in ([step.k_frozen for step in plan.steps], *(level.k_frozen for level in plan.levels)):
            if len(frozen) != len(plan.steps):
                raise BadInput(f"a level of the plan has {len(frozen)} k_frozen for {len(plan.steps)} steps")
            if any(not 0 <= k <= step.k_trained for k, step in zip(frozen, plan.steps, strict=True)):
                raise BadInput("the plan has a k_frozen that is not within 0 and its step's k_trained")
        return plan

    @property
    def hash(self) -> str:
        """Equal for equal plans of equal models, on any machine."""
        content = {key: value for key, value in self.to_json().items() if key != "rounds"}  # the steps have their ends
        parts = [self.graph.hash, self.patience, content]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from strata.planning.table import render

        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from strata.planning.table import renderable

        yield renderable(self, options.max_width)


def _execution(data: Any) -> Execution:
    asked = {name: data[name] for name in settings_of(Execution) if name in data}
    return Execution(**{**asked, "batch_size": int(data["batch"])})


def _step(data: Any, execution: Execution) -> Step:
    others = ("scale", "until_round", *IN_SOME_PLANS, "execution")
    numbers = {f.name: int(data[f.name]) for f in fields(Step) if f.name not in others}
    return Step(
        **numbers,
        scale=parse_ratio(data["scale"], "a scale"),
        until_round=_maybe(int, data["until_round"]),
        **{name: int(data.get(name, 0)) for name in IN_SOME_PLANS},
        execution=_changed(execution, data.get("execution")),
    )


def _level(data: Any, execution: Execution) -> Level:
    k_frozen = tuple(map(int, data["k_frozen"]))
    executions = tuple(_changed(execution, one or None) for one in data.get("executions", ()))
    if executions and len(executions) != len(k_frozen):
        raise ValueError(f"{len(executions)} executions of a level with {len(k_frozen)} steps")
    return Level(_maybe(float, data["constraint"]), int(data["budget_bytes"]), k_frozen, executions)


def _changed(execution: Execution, changes: Any) -> Execution | None:
    return None if changes is None else replace(execution, **changes)


def _maybe(kind: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else kind(value)


def request_json(
    model: str,
    classes: int,
    input_shape: tuple[int, ...] | InputSpec,
    execution: Execution,
    accounting: str,
    schedule: str,
    budget_bytes: int,
    full_bytes: int,
) -> dict[str, Any]:
    """What was asked for: the opening of a plan's JSON, feasible or not."""
    from strata.graph.inputs import input_json

    return {
        "model": model,
        "classes": classes,
        "input": input_json(input_shape),
        "batch": execution.batch_size,
        "accounting": accounting,
        "schedule": schedule,
        "budget_bytes": budget_bytes,
        "full_bytes": full_bytes,
        **execution.differences(Execution(execution.batch_size)),  # beside the batch, where it is not the usual way
    }
