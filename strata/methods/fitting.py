"""`strata.fit`: every method at its best within a budget, and what each would cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from strata.core.errors import BadInput, Infeasible, TooLittle
from strata.core.settings import settings_of
from strata.core.sizes import at_least_one, check_sampled, parse_bytes, several, show_bytes
from strata.execution import Execution, backward, flops, memory
from strata.execution.measured import example_labels
from strata.graph import ChannelGraph
from strata.graph.inputs import InputsLike
from strata.methods.base import Levels
from strata.methods.budget import Budget
from strata.methods.fedavg import FedAvg
from strata.methods.heads import is_prepared, prepared_model
from strata.methods.registry import METHODS, method_class
from strata.models.loading import check_float32
from strata.planning.choosing import Ceilings
from strata.planning.device_time import SAMPLES, Speed
from strata.planning.executions import LEVERS, is_normed
from strata.planning.fit import AtLevel, Fit, Way, enough_samples, recommend, with_beaten

if TYPE_CHECKING:
    from torch import nn

    from strata.execution import Memory
    from strata.graph import Cut
    from strata.methods.base import Method, Phase, Task

SAMPLED = 16  # rounds of each step of a method, at the most, that are looked at
RULED = ("fedavg", "small", "slt")  # the methods that the rule chooses among
KEEPING = ("fedavg", "window", "top")  # the same for pretrained weights
CALIBRATION = 1.0  # seconds, about
Say = Callable[[str], None]
Sampled = tuple["Task", int, float]  # a task, the rounds of its step, and how many tasks of the run it stands for


def fit(
    model: nn.Module | ChannelGraph,
    budget: str | int | Sequence[str | int],
    input_shape: InputsLike | None = None,
    *,
    rounds: int = 500,
    batch_size: int = 32,
    execution: Execution | None = None,
    max_flops: float | None = None,
    max_upload: str | int | None = None,
    norm_samples: int | None = None,
    gflops: float | None = None,
    mbit: float | None = None,
    devices: int = 100,
    per_round: int = 10,
    samples: int = SAMPLES,
    epochs: int = 1,
    methods: Sequence[str] | None = None,
    name: str | None = None,
    calibrate: bool = True,
    command: Callable[[Way], str] | None = None,
    say: Say = lambda text: None,
    plain: nn.Module | None = None,
    pretrained: bool = False,
) -> Fit:
    """All ways to train `model` within `budget` bytes ("6.5 MiB"; several: levels of devices), and the one to take.

    Every method gets the largest setting that fits by any execution, and of these the cheapest. `max_flops` (of a step,
    in units of the whole model's plain one) and `max_upload` (bytes a round and device) are further ceilings; of
    micro-batches, batch norms see at least `norm_samples` (4; the batch size: exact executions only).
    `samples`: of a device. Minutes are those of this machine, by a short calibration, or of a device with these
    `gflops` and `mbit`. `methods`: all that are registered. What does not fit is listed with how much is missing.
    `plain`: the model of a ChannelGraph, for methods that add to it (lora). `pretrained`: the weights are trained ones,
    so that methods count that keep them, and those do not that train narrow models.
    """
    sizes = tuple(parse_bytes(size) for size in several(budget))
    if not sizes:
        raise BadInput("give at least one budget in bytes, such as '24 MiB'")
    if (gflops is None) != (mbit is None):
        raise BadInput("hours of a device need both of its speeds: give gflops, such as 2, and mbit, such as 5")
    at_least_one(rounds, "rounds")
    check_sampled(per_round, devices)
    if max_flops is not None and not max_flops > 0:
        raise BadInput(f"max_flops is a multiple of plain training's FLOPs above 0, such as 2, not {max_flops}")
    fewest = None if norm_samples is None else at_least_one(norm_samples, "norm_samples")
    ceilings = Ceilings(max_flops, None if max_upload is None else parse_bytes(max_upload), fewest)
    if isinstance(model, ChannelGraph):
        graph = model
    else:
        check_float32(model)
        graph = ChannelGraph(model, input_shape or (3, 32, 32))
    execution = execution or Execution(at_least_one(batch_size, "the batch size"))
    asked = Budget(
        execution, sizes=sizes, rounds=rounds, lean=True, ceilings=ceilings, model_name=name, pretrained=pretrained
    )
    _check_ceilings(graph, asked)
    costs = _Costs(graph, execution, rounds, devices, per_round, samples, epochs)
    plain = model if plain is None and not isinstance(model, ChannelGraph) else plain
    ways: list[Way] = []
    for way in _ways(graph, asked, costs, methods, say, plain):
        # width methods that lack the same bytes for the same part have the same remedy, which takes a search
        alike = (one for one in ways if not (way.fits or one.fits) and _lack(one) == _lack(way))
        twin = next(alike, None)
        ways.append(_remedied(way, graph, asked, plain) if twin is None else replace(way, remedy=twin.remedy))
    ways += _with_more_samples(ways, graph, asked, costs, methods, say, plain)
    speed = None if gflops is None or mbit is None else Speed(gflops, mbit)
    seconds, time_on = _timing(graph, execution, speed, calibrate, per_round, say)
    timed = (
        replace(
            way,
            minutes=seconds(way) / 60 if way.fits and seconds else None,
            command=_command(way, command, sizes, rounds),
        )
        for way in ways
    )
    found = tuple(timed)
    recommended, reason = recommend(found)
    return Fit(
        name or ("graph" if isinstance(model, ChannelGraph) else type(model).__name__),
        graph.inputs.plain,
        execution.batch_size,
        sizes,
        memory(graph, graph.full(), execution).total,
        rounds,
        with_beaten(found, recommended),
        recommended,
        reason,
        time_on,
        samples=samples,
        per_round=per_round,
    )


def _with_more_samples(
    ways: Sequence[Way],
    graph: ChannelGraph,
    asked: Budget,
    costs: _Costs,
    methods: Sequence[str] | None,
    say: Say,
    model: nn.Module | None,
) -> list[Way]:
    """Where the whole model fits only in parts too small for batch norm, what others are with twice as many samples:
    with as few, the widest of them would be the whole model."""
    whole = next((way for way in ways if way.method == FedAvg.name and way.fits), None)
    if whole is None or enough_samples(whole) or asked.ceilings.norm_samples is not None:
        return []
    samples = 2 * whole.at_once
    held = replace(asked, ceilings=replace(asked.ceilings, norm_samples=samples), _choosers={})
    there = {way.method for way in ways if way.fits}
    others = [name for name in methods or _suitable(asked.pretrained) if name not in there]
    found = _ways(graph, held, costs, others, say, model)
    return [replace(way, norm_samples=samples) for way in found if way.fits]


def recommended(graph: ChannelGraph, budget: Budget) -> Way:
    """The way that `fit` would recommend within this budget, by the same rule."""
    ruled = KEEPING if budget.pretrained else RULED
    ways = tuple(_ways(graph, budget, _Costs(graph, budget.execution, budget.rounds), ruled))
    number, reason = recommend(ways)
    if number is None:
        raise Infeasible(reason)
    return ways[number]


def what_fits(graph: ChannelGraph, budget: Budget) -> str:
    """For a refusal: which ways there are within the budget, in one sentence."""
    lean = replace(budget, lean=True, options={}, reserve=None, accounting=None)
    ruled = KEEPING if budget.pretrained else RULED
    ways = [way for way in _ways(graph, lean, _Costs(graph, lean.execution, lean.rounds), ruled) if way.fits]
    if not ways:
        return "nothing else fits either: give a larger budget (`strata fit` says which)"
    size = min(budget.sizes)
    named = "; ".join(
        f"{way.method} at {way.setting}, {flags_for(way.execution)} ({show_bytes(way.peak_bytes)})" for way in ways
    )
    return f"within {show_bytes(size)}: {named}; `strata run --lean` finds these settings"


def flags_for(execution: Execution) -> str:
    """Of its levers, as on the command line."""
    turned = execution.differences(Execution(execution.batch_size))
    words = _flags({name: value for name, value in turned.items() if name in LEVERS})
    return f"with {words}" if words else "as it is"


def _flags(values: Mapping[str, Any]) -> str:
    known = settings_of(Execution)
    options = ((known[name].option_of(name), value) for name, value in values.items())
    return " ".join(option if value is True else f"{option} {value}" for option, value in options)


def _ways(
    graph: ChannelGraph,
    budget: Budget,
    costs: _Costs,
    methods: Sequence[str] | None = None,
    say: Say = lambda text: None,
    model: nn.Module | None = None,
) -> Iterator[Way]:
    for name in methods or _suitable(budget.pretrained):
        say(f"fitting {name}")
        own = _own_graph(method_class(name), graph, model)
        if own is None:
            continue
        way = _way(name, own, budget, costs.of(own))
        if way is not None:
            yield way


def _suitable(pretrained: bool) -> list[str]:
    """Weights that were trained before are to be kept; without them, to freeze any would be to freeze noise."""
    known = [(name, method.card.for_pretrained) for name, method in METHODS.items()]
    return [name for name, keeps in known if keeps == pretrained or name == FedAvg.name]


def _own_graph(method: type[Method], graph: ChannelGraph, model: nn.Module | None) -> ChannelGraph | None:
    """A method that adds to the model has another graph; None where there is no model to add to."""
    if not is_prepared(method):
        return graph
    return None if model is None else ChannelGraph(prepared_model(method, model, graph.inputs, 0), graph.inputs)


def _check_ceilings(graph: ChannelGraph, budget: Budget) -> None:
    narrowest = graph.prefix(0.001)
    if not budget.chooser(graph).allows(narrowest, budget.execution):
        raise BadInput(
            f"no way is within the ceiling of {budget.ceilings}, whatever the memory: even one channel per layer takes "
            "more; raise it"
        )


def _command(way: Way, command: Callable[[Way], str] | None, sizes: tuple[int, ...], rounds: int) -> str:
    if not way.fits:
        return ""
    if command is not None:
        return command(way)
    budget = sizes[0] if len(sizes) == 1 else list(sizes)
    return (
        f'strata.run(model, data, "{way.method}", budget={budget}, lean=True, rounds={rounds}, out="runs/{way.method}")'
    )


def _way(name: str, graph: ChannelGraph, budget: Budget, costs: _Costs) -> Way | None:
    """None: the method makes nothing of this network (fjord of levels that are not nested), or is another one."""
    method = method_class(name)
    normed = is_normed(graph)
    try:
        made = method.from_budget(graph, budget).executed(budget)
    except Infeasible as error:
        return _short(name, graph, budget, error)
    except BadInput:
        return None
    tasks = list(costs.tasks(made))
    if budget.execution.caches and not costs.keeps(made, tasks):
        return _way(name, graph, budget.with_execution(replace(budget.execution, cache_prefix=None)), costs.plainly())
    if not isinstance(made, FedAvg) and all(task.cut == graph.full() for task, _, _ in tasks):
        return None  # the whole model under another name
    train, simulated, up, down = costs.totals(tasks)
    mapped = costs.mapped(tasks)
    return Way(
        name,
        made.setting,
        costs.execution_of(tasks) if mapped else replace(costs.execution_of(tasks), frozen_weights="memory"),
        True,
        costs.peak(made, tasks, budget),
        mapped_bytes=mapped,
        trained_share=costs.trained_share(made, tasks),
        train_flops=train,
        simulated_flops=simulated,
        upload_bytes=up,
        download_bytes=down,
        normed=normed,
        everywhere=all(map(made.can_train, range(len(budget.sizes)))),
        levels=costs.levels(made, tasks, budget) if len(budget.sizes) > 1 else (),
    )


def _short(name: str, graph: ChannelGraph, budget: Budget, error: Infeasible) -> Way:
    """What it would need at the least: of the whole model, of a plan's smallest budget, or of the narrowest model."""
    chooser = budget.of(method_class(name)).chooser(graph)
    remedies = getattr(error, "remedies", None)
    if isinstance(error, TooLittle):
        need, what, execution = error.need, error.what, chooser.executions[-1]
    elif remedies is not None:
        need, what, execution = remedies.smallest_budget_bytes, "its smallest plan", chooser.executions[-1]
    else:
        width = 1.0 if not issubclass(method_class(name), Levels) or name == "fedavg" else 0.001
        cut = graph.prefix(width)
        execution = min(chooser.executions, key=lambda one: chooser.memory(cut, one).total)
        need, what = chooser.memory(cut, execution).total, "the whole model" if width == 1 else "one channel per layer"
    short = max(0, need - min(budget.sizes))
    ceiling = "" if short else str(budget.ceilings)  # it would fit, but costs more than is allowed
    return Way(name, what, execution, False, need, short, ceiling=ceiling, normed=is_normed(graph))


def _lack(way: Way) -> tuple[int, str, bool]:
    return way.peak_bytes, way.setting, issubclass(method_class(way.method), Levels)


def _remedied(way: Way, graph: ChannelGraph, budget: Budget, model: nn.Module | None) -> Way:
    """A way that does not fit, with the settings by which it would that `fit` leaves to the user: the one rounds, the
    other needs a file on the device."""
    if way.fits:
        return way
    method, execution = method_class(way.method), budget.execution
    own = _own_graph(method, graph, model)
    mapped: dict[str, Any] = {"frozen_weights": "mapped"}
    rounded: dict[str, Any] = {"momentum_dtype": "bfloat16"}
    for changes in (mapped, rounded, mapped | rounded):
        try:
            looser = replace(execution, **changes)  # not by every optimizer
            if own is None or looser == execution:
                continue
            method.from_budget(own, budget.with_execution(looser))
        except (Infeasible, BadInput):
            continue
        return replace(way, remedy=_flags(changes))
    return way


# --- what a way costs ------------------------------------------------------------------------------------------------


class _Costs:
    """Of methods over a run, seen through some of their tasks."""

    def __init__(
        self,
        graph: ChannelGraph,
        execution: Execution,
        rounds: int,
        devices: int = 100,
        per_round: int = 10,
        samples: int = 1,
        epochs: int = 1,
    ) -> None:
        self.graph, self.execution, self.rounds, self.epochs = graph, execution, rounds, epochs
        self.devices, self.per_round = devices, min(per_round, devices)
        self.own_samples, self.samples = samples, samples * epochs
        self._flops: dict[Any, int] = {}
        self._memory: dict[Any, Memory] = {}

    def of(self, graph: ChannelGraph) -> _Costs:
        """The same of another graph."""
        if graph is self.graph:
            return self
        return self._with(graph, self.execution)

    def plainly(self) -> _Costs:
        """The same where nothing is kept of what frozen layers put out."""
        return self._with(self.graph, replace(self.execution, cache_prefix=None))

    def _with(self, graph: ChannelGraph, execution: Execution) -> _Costs:
        sizes = (self.devices, self.per_round, self.own_samples, self.epochs)
        return _Costs(graph, execution, self.rounds, *sizes)

    def keeps(self, method: Method, tasks: Sequence[Sampled]) -> bool:
        """Whether frozen layers run twice on the same weights (as checks.kept_phases of a run asks)."""
        steps = [self._step(method, round) for round in range(self.rounds)]
        again = set(steps) if self.epochs > 1 else {a for a, b in pairwise(steps) if a == b}
        return any(
            self._memory_of(phase).kept
            for task, _, _ in tasks
            if self._step(method, task.round) in again
            for phase in task.phases
        )

    def tasks(self, method: Method) -> Iterator[Sampled]:
        """Some of every step."""
        steps: dict[int, list[int]] = {}
        for round in range(self.rounds):
            steps.setdefault(self._step(method, round), []).append(round)
        # fd draws for each device, but within its level
        period = method.period or (len(method.constraints) if isinstance(method, Levels) else 1)
        levels = max(1, min(period, self.devices))
        for rounds in steps.values():
            chosen = rounds[:: -(-len(rounds) // SAMPLED)]
            tasks = [task for round in chosen for task in method.assign(round, range(levels))]
            for task in tasks:
                yield task, len(rounds), len(rounds) * self.per_round / len(tasks)

    @staticmethod
    def _step(method: Method, round: int) -> int:
        plan = getattr(method, "plan", None)
        # early stopping decides it in training: all of it at the last step is the most that it costs
        return len(plan.steps) - 1 if plan is not None and plan.schedule == "early-stopping" else method.step(round)

    def totals(self, tasks: Sequence[Sampled]) -> tuple[int, int, int, int]:
        """FLOPs of devices, the same without what a simulation does not compute again, bytes up, bytes down."""
        train = simulated = up = down = 0.0
        for task, rounds, count in tasks:
            trained, frozen = self._bytes(task)
            # frozen layers come down once in a step to every device that is asked in it
            asked = rounds * self.per_round
            first = self.devices * (1 - (1 - self.per_round / self.devices) ** rounds) / asked
            train += count * self.samples * sum(map(self._flops_of, task.phases))
            simulated += count * self.samples * sum(map(self._flops_of, map(self._once, task.phases)))
            up += count * trained
            down += count * (trained + frozen * min(1.0, first))
        return round(train), round(simulated), round(up), round(down)

    def peak(self, method: Method, tasks: Sequence[Sampled], budget: Budget) -> int:
        found = [one.total for one in self._memories(tasks)]
        if isinstance(method, Levels):  # with what a device keeps beside its own level
            levels = [level for level in range(len(method.constraints)) if method.can_train(level)]
            found += [self._of_level(method, level, budget) for level in levels]
        return max(found, default=0)

    def levels(self, method: Method, tasks: Sequence[Sampled], budget: Budget) -> tuple[AtLevel, ...]:
        """Of each that takes part, the smallest budget first."""
        own: dict[int, list[Sampled]] = {}
        for one in tasks:
            own.setdefault(one[0].device % len(budget.sizes), []).append(one)
        return tuple(
            AtLevel(
                self._of_level(method, level, budget)
                if isinstance(method, Levels)
                else max(one.total for one in self._memories(own[level])),
                self.execution_of(own[level]),
            )
            for level in sorted(own, key=lambda level: budget.sizes[level])
        )

    def _of_level(self, method: Levels, level: int, budget: Budget) -> int:
        own = (method.executions[level] if method.executions else None) or self.execution
        chooser = budget.chooser(self.graph)
        return method.most_bytes(lambda cut: chooser.memory(cut, own).total)[level]

    def mapped(self, tasks: Sequence[Sampled]) -> int:
        return max((one.mapped for one in self._memories(tasks)), default=0)

    def trained_share(self, method: Method, tasks: Sequence[Sampled]) -> float:
        names = {name for task, _, _ in tasks for name in task.cut.trained}
        cut, full = method.server_cut(), self.graph.full()
        trained = sum(prod(cut.shapes[name]) for name in names)
        return trained / sum(prod(full.shapes[name]) for name in full.parameters)

    def execution_of(self, tasks: Sequence[Sampled]) -> Execution:
        """Of its largest task."""
        phases = [phase for task, _, _ in tasks for phase in task.phases]
        largest = max(phases, key=lambda phase: self._memory_of(phase).total)
        return largest.execution or self.execution.alone

    def _memories(self, tasks: Sequence[Sampled]) -> list[Memory]:
        return [self._memory_of(phase) for task, _, _ in tasks for phase in task.phases]

    def _key(self, cut: Cut, execution: Execution | None) -> Any:
        return cut.output, tuple(cut.shapes.values()), cut.frozen, execution

    def _memory_of(self, phase: Phase) -> Memory:
        key = self._key(phase.cut, phase.execution)
        if key not in self._memory:
            self._memory[key] = memory(self.graph, phase.cut, phase.execution or self.execution)
        return self._memory[key]

    def _once(self, phase: Phase) -> Phase:
        """Without recomputation."""
        return replace(phase, execution=replace(phase.execution or self.execution, activation_checkpointing=None))

    def _flops_of(self, phase: Phase) -> float:
        levels = phase.levels or (phase.cut,)
        for cut in levels:
            key = self._key(cut, phase.execution)
            if key not in self._flops:
                self._flops[key] = flops(self.graph, cut, phase.execution or self.execution).real_train
        return sum(self._flops[self._key(cut, phase.execution)] for cut in levels) / len(levels)

    def _bytes(self, task: Task) -> tuple[int, int]:
        """Of the trained and of the frozen parameters."""
        cut, sizes = task.cut, self.graph.state_dtypes
        trained = sum(prod(cut.shapes[name]) * sizes[name].itemsize for name in cut.trained)
        return trained, sum(prod(cut.shapes[name]) * sizes[name].itemsize for name in cut.frozen if name in cut.shapes)


def _timing(
    graph: ChannelGraph, execution: Execution, speed: Speed | None, calibrate: bool, per_round: int, say: Say
) -> tuple[Callable[[Way], float] | None, str]:
    """Seconds of a way, and on what."""
    if speed is not None:
        given = speed

        def of_device(way: Way) -> float:  # the devices of a round work at the same time
            return given.seconds(way.train_flops, way.upload_bytes + way.download_bytes) / per_round

        return of_device, f"of devices with {speed}"
    if not calibrate:
        return None, ""
    say("timing a few steps of the whole model")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rate = cores * flops_per_second(graph, execution)
    simulated = f"of {cores} cores here, as fast as they are just now, by a few steps of the whole model and FLOPs"
    return (lambda way: way.simulated_flops / rate), simulated


def flops_per_second(graph: ChannelGraph, execution: Execution) -> float:
    """Of one core in training the whole model, by a few real steps."""
    samples = min(execution.at_once, 16)
    few = replace(execution.alone, batch_size=samples, micro_batch=None, activation_checkpointing=None)
    module, inputs = graph.submodel(graph.full(), zeros=True), graph.inputs.example(samples)
    module.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            labels = example_labels(graph.output_shape, samples)
            fastest, begin = float("inf"), time.perf_counter()
            while fastest == float("inf") or time.perf_counter() - begin < CALIBRATION:
                start = time.perf_counter()
                backward(module, inputs, labels, few, None)
                fastest = min(fastest, time.perf_counter() - start)
                module.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return samples * flops(graph, graph.full()).real_train / fastest
