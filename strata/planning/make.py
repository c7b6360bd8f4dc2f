"""`strata.plan`: a model and a budget to a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from strata.core.errors import BadInput, Infeasible
from strata.core.sizes import at_least_one, parse_bytes, parse_input, parse_ratio, several
from strata.execution import ACCOUNTINGS, Execution, memory, scratch_bytes
from strata.graph import ChannelGraph
from strata.graph.inputs import InputsLike, InputSpec, same_inputs
from strata.models.loading import check_float32
from strata.planning.choosing import Chooser
from strata.planning.executions import candidates
from strata.planning.infeasible import PlanInfeasible, remedies, shortfall, smallest_budget
from strata.planning.plans import Level, Plan, Step, request_json
from strata.planning.pricing import Pricing
from strata.planning.reserve import check_reserve, reserving
from strata.planning.schedules import DEFAULT_PATIENCE, SCHEDULES, until_rounds
from strata.planning.search import Configuration, search, smallest_frozen, with_narrower_head

if TYPE_CHECKING:
    from torch import nn


def plan(
    model: nn.Module | ChannelGraph,
    input_shape: InputsLike | None = None,
    batch_size: int = 32,
    budget: str | int | Sequence[str | int] | None = None,
    constraint: float | Sequence[float] | None = None,
    rounds: int = 500,
    accounting: str | None = None,
    schedule: str = "cumulative",
    head_fraction: float = 1.0,
    patience: int = DEFAULT_PATIENCE,
    name: str | None = None,
    micro_batch: int | None = None,
    proximal: float = 0.0,
    activation_checkpointing: int | str | None = None,
    execution: Execution | None = None,
    lean: bool = False,
    chooser: Chooser | None = None,
    reserve: str | None = None,
    width: str | None = None,
) -> Plan:
    """The steps of Successive Layer Training within `budget` bytes ("24 MiB"), or within what the model scaled to the
    width `constraint` needs. Several budgets or constraints are levels of devices.

    `accounting` says how bytes are counted: `peak` (live bytes of a real training step; default with `budget`) or
    `paper` (default with `constraint`). With `micro_batch` devices take so many samples of a batch at a time and sum
    the gradients; with `activation_checkpointing` they compute most activations anew. Give both to LocalTraining too.
    `proximal` counts the copy of the weights that FedProx keeps. An `execution` says all of this at once; as a
    strata.training.LocalTraining it may have an optimizer of your own, and what that keeps is counted too.
    With `lean` each step is executed in the cheapest way that fits (`chooser`: among these). A
    ChannelGraph may stand in for the model, to export it only once. `input_shape` is (3, 32, 32) if not given, or the
    ChannelGraph's own; other inputs are an InputSpec, or text such as "input_ids:int64:64,attention_mask:bool:64".
    reserve="scratch": library scratch, measured once per machine, has to fit into the budget too. width="inner": the
    residual stream, which blocks add to, is not cut.
    Raises PlanInfeasible where nothing fits, BadInput where the request makes no sense.
    """
    asked = _levels(budget, constraint)
    rounds = at_least_one(rounds, "the number of rounds")
    patience = at_least_one(patience, "the patience")
    head_fraction = parse_ratio(head_fraction, "the head fraction")
    accounting = accounting or ("paper" if budget is None else "peak")
    if accounting not in ACCOUNTINGS:
        raise BadInput(f"unknown accounting {accounting!r}: use {' or '.join(ACCOUNTINGS)}")
    if schedule not in SCHEDULES:
        raise BadInput(f"unknown schedule {schedule!r}: use {', '.join(SCHEDULES)}")
    if execution is None:
        execution = Execution(
            at_least_one(batch_size, "the batch size"),
            None if micro_batch is None else at_least_one(micro_batch, "the micro-batch"),
            activation_checkpointing,
            proximal=float(proximal),
        )
    graph = _graph(model, input_shape, width)
    if lean and (budget is None or accounting != "peak"):
        raise BadInput(
            "lean chooses how steps are executed by the bytes that they take: give a budget, counted by peak"
        )
    if lean and chooser is None:
        chooser = Chooser(graph, candidates(graph, execution))
    check_reserve(reserve, () if budget is None else asked, accounting)
    made = partial(
        _plan, graph, execution=execution, accounting=accounting, rounds=rounds, schedule=schedule,
        head_fraction=head_fraction, patience=patience, name=name or _name(model), chooser=chooser,
    )  # fmt: skip
    if reserve is None:
        return made(asked)
    sizes = [int(size) for size in asked]
    within = reserving(sizes, made, lambda found: _with_scratch(found, execution))
    levels = tuple(replace(level, budget_bytes=size) for level, size in zip(within.levels, sizes, strict=False))
    return replace(within, budget_bytes=min(sizes), levels=levels, reserve=reserve)


def _plan(
    graph: ChannelGraph,
    asked: Sequence[int | float],
    *,
    execution: Execution,
    accounting: str,
    rounds: int,
    schedule: str,
    head_fraction: float,
    patience: int,
    name: str,
    chooser: Chooser | None,
) -> Plan:
    price = Pricing(graph, execution, accounting, chooser)
    budgets = [ask if isinstance(ask, int) else price.of_width(ask) for ask in asked]
    weakest = min(budgets)
    full_bytes = price.memory(0, 0, 1.0).total
    configurations = search(price.within(weakest), graph.depth, price.scales, weakest)
    if configurations is None:
        request = request_json(
            name, graph.classes, graph.inputs.plain, execution, accounting, schedule, weakest, full_bytes
        )
        raise _infeasible(price, weakest, request)
    if head_fraction < 1:
        configurations = with_narrower_head(price.within(weakest), configurations, price.scales, weakest, head_fraction)
    levels = _device_levels(price, configurations, asked, budgets) if len(asked) > 1 else ()
    ends = until_rounds(schedule, price.trained_parameters, [c.scale for c in configurations], rounds)
    return Plan(
        model=name,
        classes=graph.classes,
        input_shape=graph.inputs.plain,
        execution=execution.alone,
        accounting=accounting,
        schedule=schedule,
        budget_bytes=weakest,
        full_bytes=full_bytes,
        steps=tuple(
            _step(price, n, c, end, weakest) for n, (c, end) in enumerate(zip(configurations, ends, strict=True))
        ),
        levels=levels,
        patience=patience,
        rounds_in_all=rounds if schedule == "early-stopping" else None,
        graph=graph,
    )


def _with_scratch(plan: Plan, execution: Execution) -> list[int]:
    """Of each level, the most that a step takes with what libraries take beside it. `execution`: the run's, which may
    have an optimizer that plans do not name."""

    def of_step(step: int, level: int | None) -> int:
        cut, chosen = plan.cut(step, level), plan.execution_at(step, level)
        own = execution if chosen == plan.execution else chosen
        return memory(plan.graph, cut, own).total + scratch_bytes(plan.graph, cut, own)

    levels = range(len(plan.levels)) if plan.levels else (None,)
    return [max(of_step(step, level) for step in range(len(plan.steps))) for level in levels]


def _graph(model: nn.Module | ChannelGraph, inputs: InputsLike | None, width: str | None) -> ChannelGraph:
    if not isinstance(model, ChannelGraph):
        check_float32(model)
        return ChannelGraph(model, (3, 32, 32) if inputs is None else _checked(inputs), width=width or "residual")
    if width not in (None, model.width):
        raise BadInput(
            f"the graph was made for width {model.width!r}, not {width!r}: ChannelGraph(..., width={width!r})"
        )
    if inputs is not None and not same_inputs(InputSpec.of(_checked(inputs)), model.inputs):
        raise BadInput(f"the graph was made for inputs of {model.inputs}, not {InputSpec.of(_checked(inputs))}")
    return model


def _checked(inputs: InputsLike) -> InputsLike:
    return inputs if isinstance(inputs, Mapping | InputSpec) else parse_input(inputs)


def _levels(
    budget: str | int | Sequence[str | int] | None, constraint: float | Sequence[float] | None
) -> list[int | float]:
    """What each level of devices was given, in order: bytes as int, or a constraint as float."""
    if (budget is None) == (constraint is None):
        raise BadInput("give either a budget in bytes, such as '24 MiB', or a constraint ratio, such as 0.25")
    levels: list[int | float] = []
    if budget is not None:
        levels += map(parse_bytes, several(budget))
    if constraint is not None:
        levels += map(parse_ratio, several(constraint))
    if not levels:
        raise BadInput("the list of budgets is empty: give at least one")
    return levels


def _device_levels(
    price: Pricing, steps: Sequence[Configuration], asked: Sequence[int | float], budgets: Sequence[int]
) -> tuple[Level, ...]:
    levels = []
    for ask, budget in zip(asked, budgets, strict=True):
        weakest = budget == min(budgets)
        k_frozen = [step.k_frozen if weakest else smallest_frozen(price.within(budget), step, budget) for step in steps]
        where = [(frozen, step.k_trained, step.scale) for frozen, step in zip(k_frozen, steps, strict=True)]
        executions = tuple(_own(price.execution_of(*one, budget), price.execution) for one in where)
        levels.append(
            Level(
                ask if isinstance(ask, float) else None,
                budget,
                tuple(k_frozen),
                executions if any(executions) else (),
            )
        )
    return tuple(levels)


def _step(price: Pricing, number: int, configuration: Configuration, until_round: int | None, budget: int) -> Step:
    where = (configuration.k_frozen, configuration.k_trained, configuration.scale)
    execution = price.execution_of(*where, budget)
    memory = price.memory(*where, execution)
    return Step(
        number, *where, memory.total, memory.weights, memory.gradients, memory.activations,
        price.trained_parameters(*where), price.upload_bytes(*where), price.train_flops(*where, execution), until_round,
        memory.mapped, _own(execution, price.execution), memory.kept,
    )  # fmt: skip


def _own(execution: Execution, plans: Execution) -> Execution | None:
    """None where it is the plan's."""
    return None if execution == plans else execution.alone


def _infeasible(price: Pricing, budget: int, request: dict[str, object]) -> PlanInfeasible:
    narrowest = price.scales[0]

    def fits(at: Pricing) -> bool:
        return shortfall(at.bytes, at.depth, narrowest, budget) is None

    short = shortfall(price.bytes, price.depth, narrowest, budget)
    if short is None:
        raise Infeasible(f"no plan is within the ceiling of {price.chooser.ceilings}: raise it")
    smallest = smallest_budget(price.bytes, price.depth, narrowest)
    return PlanInfeasible(
        request,
        short,
        remedies(
            smallest,
            price.execution.batch_size,
            lambda batch: fits(price.by(replace(price.execution, batch_size=batch, micro_batch=None))),
            lambda part: fits(price.by(replace(price.execution, micro_batch=part, release_gradients=False))),
        ),
    )


def _name(model: nn.Module | ChannelGraph) -> str:
    return "graph" if isinstance(model, ChannelGraph) else type(model).__name__
