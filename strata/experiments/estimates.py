"""What runs will cost, before they start: FLOPs in closed form, seconds from a quick calibration. No data needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.data import ImageSet
from strata.execution import flops
from strata.execution.measured import one_thread
from strata.experiments.setups import SETUPS, Setup
from strata.graph import ChannelGraph, Input, InputSpec
from strata.graph.inputs import taken_by
from strata.methods import SLT, Task, method_class
from strata.methods.heads import is_prepared, prepared_model
from strata.models.loading import load_model
from strata.runs.launch import make_method, own_options
from strata.runs.session import flops_of_tasks
from strata.training import LocalTraining, Workspace, cohorts, kernels, train_cohort, train_device

if TYPE_CHECKING:
    from strata.experiments.base import PlannedRun
    from strata.graph import Cut
    from strata.methods import Method
    from strata.runs.config import RunConfig

BATCHES = 2  # per device in a calibration, after one to warm up
BATCH_EVALUATED = 64
LONG = 2.0  # seconds
ENOUGH = 45.0  # seconds of measuring in all

TEXT = {"input_ids": torch.int64, "attention_mask": torch.bool}  # what a model may take of text
PerSample = Callable[[Task], int]  # FLOPs


@dataclass(frozen=True)
class Estimate:
    """Of a whole run. Seconds are those of one core, None without calibration."""

    train_flops: float
    forward_flops: float  # of evaluations
    seconds: float | None

    @property
    def flops(self) -> float:
        return self.train_flops + self.forward_flops


@dataclass(frozen=True)
class Stage:
    """Rounds in which devices do the same kind of work."""

    rounds: int
    tasks: tuple[Task, ...]  # one device of each level
    evaluated: Cut


@dataclass(frozen=True)
class Network:
    workspace: Workspace
    state: Mapping[str, Tensor]

    @property
    def graph(self) -> ChannelGraph:
        return self.workspace.graph


@dataclass
class Estimator:
    """Remembers networks, costs and measurements, so that runs that are alike cost nothing more."""

    calibrate: bool = True
    _networks: dict[tuple[str, str, str | None], Network] = field(default_factory=dict)
    _estimates: dict[tuple[str, int], Estimate] = field(default_factory=dict)
    _speeds: dict[tuple[str, str, str], dict[int, float]] = field(default_factory=dict)
    _spent: float = 0.0  # seconds of measuring

    def of(self, run: PlannedRun) -> Estimate:
        key = (run.cell.name, run.request.course.rounds)  # seeds cost the same
        if key not in self._estimates:
            self._estimates[key] = self._estimate(run.request)
        return self._estimates[key]

    def _estimate(self, request: RunConfig) -> Estimate:
        setup = SETUPS[request.problem.data]
        network = self._network(request, setup)
        method = make_method(request, network.graph)
        settings = _settings(request, setup)
        per_sample = flops_of_tasks(method, lambda cut, own: network.workspace.recomputed_flops(cut, own or settings))
        stages = stages_of(method, request)
        speeds: dict[int, tuple[float, float]] = {}  # FLOP per second of one core in training and evaluation, by stage
        if self.calibrate and setup.vocabulary is None:  # only images are drawn at random
            for number in sorted({0, len(stages) // 2, len(stages) - 1}):
                stage = stages[number]
                training = self._speed(stage, network, request, settings, per_sample)
                speeds[number] = training, self._forward_speed(stage.evaluated, network, setup)
        evaluations = 1 / (request.evaluation.eval_every or 1)  # per round
        train = forward = seconds = 0.0
        for number, stage in enumerate(stages):
            samples = stage.rounds * request.fleet.per_round * setup.per_device
            here = samples * sum(map(per_sample, stage.tasks)) / len(stage.tasks)
            decides = method.needs_accuracy and stage is not stages[-1]  # where early stopping looks at every round
            judged = stage.rounds * (1 if decides else evaluations) * setup.test_samples
            judged *= flops(network.graph, stage.evaluated).forward
            train += here
            forward += judged
            if speeds:
                training, evaluation = speeds[min(speeds, key=lambda known: abs(known - number))]
                seconds += here / training + judged / evaluation
        return Estimate(train, forward, seconds if speeds else None)

    def _network(self, request: RunConfig, setup: Setup) -> Network:
        method = method_class(request.approach.method)
        key = (request.problem.model, setup.data, method.name if is_prepared(method) else None)
        if key not in self._networks:
            task = "next-token" if setup.data == "shakespeare" else "classification"
            module = load_model(request.problem.model, setup.classes, setup.input, setup.vocabulary, task)
            inputs = InputSpec.of(setup.input)
            if setup.vocabulary is not None:
                names = taken_by(module, tuple(TEXT))
                inputs = InputSpec(tuple(Input(name, setup.input, TEXT[name]) for name in names))
            module = prepared_model(method, module, inputs, 0, own_options(request))
            self._networks[key] = Network(Workspace(ChannelGraph(module, inputs)), module.state_dict())
        return self._networks[key]

    def _speed(
        self, stage: Stage, network: Network, request: RunConfig, settings: LocalTraining, per_sample: PerSample
    ) -> float:
        """Over one device, or one vectorised group of devices, of each level."""
        setup = SETUPS[request.problem.data]
        work = seconds = 0.0
        for task in stage.tasks:
            devices = max(1, request.fleet.per_round // len(stage.tasks))
            alike = [replace(task, device=task.device + n * len(stage.tasks)) for n in range(devices)]
            group = cohorts(network.workspace, alike, [settings.batch_size * BATCHES] * devices, settings)[0]
            cost = per_sample(task)

            def measure(cost: int = cost, tasks: Sequence[Task] = alike[: len(group)]) -> float:
                return cost / seconds_per_sample(network, tasks, settings, setup)

            work += cost
            seconds += cost / self._known((request.problem.model, setup.data, "training"), cost, measure)
        return work / seconds

    def _forward_speed(self, cut: Cut, network: Network, setup: Setup) -> float:
        cost = flops(network.graph, cut).forward

        def measure() -> float:
            module = network.graph.submodel(cut, cut.extract(network.state)).train()  # batch statistics, as published
            images = torch.randn(BATCH_EVALUATED, *setup.input, generator=torch.Generator().manual_seed(0))
            with one_thread(), torch.no_grad():
                module(images[:2])
                began = time.perf_counter()
                module(images)
                return cost * len(images) / (time.perf_counter() - began)

        return self._known((network.graph.hash, setup.data, "evaluation"), cost, measure)

    def _known(self, kind: tuple[str, str, str], cost: int, measure: Callable[[], float]) -> float:
        """The speed of work of this kind and cost; after enough time of measuring, that of the nearest cost."""
        known = self._speeds.setdefault(kind, {})
        if cost not in known:
            if known and self._spent > ENOUGH:
                return known[min(known, key=lambda other: abs(other - cost))]
            began = time.perf_counter()
            known[cost] = measure()
            self._spent += time.perf_counter() - began
        return known[cost]


def _settings(request: RunConfig, setup: Setup) -> LocalTraining:
    """As the run trains, with stand-ins for the data's mean and standard deviation."""
    channels = setup.input[0]
    return LocalTraining(
        **vars(request.execution),
        augmentation=request.local.augmentation or setup.augmentation,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        kernels=request.may_use_kernels and kernels.available(),
        shortened=not request.course.exact,
    )


def seconds_per_sample(network: Network, tasks: Sequence[Task], settings: LocalTraining, setup: Setup) -> float:
    """Of training these devices on one core, with random images."""
    generator = torch.Generator().manual_seed(0)
    count = settings.batch_size * BATCHES
    images = torch.randint(0, 256, (count, *setup.input), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, setup.classes, (count,), generator=generator)
    tensors = [task.cut.extract(network.state) for task in tasks]
    workspace = network.workspace

    def train(samples: int) -> None:
        own = ImageSet(images[:samples], labels[:samples])
        together = len(tasks) > 1 and train_cohort(workspace, tasks, tensors, [own] * len(tasks), settings, 0.01, 0)
        if not together:
            for task, values in zip(tasks, tensors, strict=True):
                train_device(workspace, task, values, own, settings, 0.01, 0)

    with one_thread():
        began = time.perf_counter()
        train(settings.batch_size)  # builds the submodel and measures its memory: not what a round costs
        samples = count if time.perf_counter() - began < LONG else settings.batch_size
        began = time.perf_counter()
        train(samples)
        return (time.perf_counter() - began) / (samples * len(tasks))


def stages_of(method: Method, request: RunConfig) -> list[Stage]:
    """SLT's steps that get rounds (early stopping: assumed to be equally long), or the one stage of the others."""
    rounds, levels = request.course.rounds, max(1, len(request.approach.constraints))
    if not isinstance(method, SLT):
        tasks = method.assign(0, [device for device in range(levels) if method.can_train(device)])
        return [Stage(rounds, tuple(tasks), method.evaluation_cut(rounds - 1))]
    plan, stages, begun = method.plan, [], 0
    for step in plan.steps:
        ends = step.until_round
        if ends is None:
            ends = round(rounds * (step.step + 1) / len(plan.steps))
        if ends > begun:
            cuts = [plan.cut(step.step, level) for level in range(levels)] if plan.levels else [plan.cut(step.step)]
            tasks = [Task(begun, device, cut) for device, cut in enumerate(cuts)]
            stages.append(Stage(ends - begun, tuple(tasks), plan.cut(step.step)))
            begun = ends
    return stages
