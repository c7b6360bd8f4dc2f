"""`strata.run`: a whole run, from its settings to model.safetensors, that can be stopped and resumed at any moment.

`carry_out` is the core below `strata.run` (Python) and `launch` (the command line, experiments and fleets).
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import nn

from strata.core.errors import BadInput
from strata.core.flags import help_text
from strata.core.processes import Interrupts
from strata.core.sizes import parse_bytes, several, show_bytes
from strata.data import FederatedData, Partition, Samples, check_range, from_indices, hold_out, parse_partition
from strata.engines import Engine, InlineEngine
from strata.engines.common_process import IN_WORKER
from strata.engines.ray import Ray
from strata.execution import Execution
from strata.federation.aggregation import ServerOptimizer
from strata.federation.jobs import DeviceProgram, TrainJob
from strata.federation.kept_prefixes import FOLDER, KeptPrefixes
from strata.federation.membership import Present
from strata.federation.norm_statistics import NormStatistics, check_norms
from strata.federation.rounds import RoundSettings
from strata.federation.simulated_fleet import parse_stragglers
from strata.graph import ChannelGraph
from strata.methods import SLT, Method, Task
from strata.methods.choice import class_of, method_named
from strata.methods.heads import plain_state, prepared_model
from strata.models.loading import check_float32
from strata.runs import folder as folders
from strata.runs.allowance import Allowance
from strata.runs.callbacks import Callback, Callbacks, trackers
from strata.runs.checks import (
    check_augmented,
    check_fit,
    check_hooks,
    check_last,
    check_phases,
    check_planned,
    check_privacy,
    check_renumbering,
    kept_phases,
    narrowing,
    unaugmented,
)
from strata.runs.components import DEFAULT_ROUNDS
from strata.runs.config import ADAM_LR, AUTO, FORMAT, RunOptions, warmup_of
from strata.runs.folder import RunFolder
from strata.runs.progress import display
from strata.runs.session import Result, Session
from strata.runs.workers import make_engine
from strata.training import COHORT, WIDEST, LocalTraining, Workspace, cohorts, kernels, rate
from strata.training.settings import OptimizerFactory

MOST_GROWTH = 10.0  # of the model's norm in a round of real devices, which may lie
Partitions = str | Partition | Sequence[Sequence[int] | np.ndarray]


def run(
    model: nn.Module,
    data: FederatedData,
    method: Method | str | type[Method],
    *,
    out: str | Path,
    constraint: float | Sequence[float] | None = None,
    budget: int | str | Sequence[int | str] | None = None,
    reserve: str | None = None,
    rounds: int | None = None,
    partition: Partitions = "iid",
    sizes: str | None = None,
    training: LocalTraining | None = None,
    optimizer: OptimizerFactory | str | None = None,
    devices: int | None = None,
    workers: int | None = None,
    engine: Engine | Ray | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    from_round: int | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    mlflow: bool = False,
    callbacks: Iterable[Callback] = (),
    request: Mapping[str, Any] | None = None,
    adjusted: Callable[[Method, int], Method] | None = None,
    pretrained: bool = False,
    server: ServerOptimizer | None = None,
    lean: bool = False,
    width: str = "residual",
    **options: Any,
) -> Result:
    """Trains `model` over the fleet by `method` into the folder `out`.

    method: such as strata.SLT(plan), or a name or class with a `constraint` (0.25) or `budget` ("24 MiB"; several:
        levels) and options of its own, such as rank=4 of "lora" (strata methods lists them).
    reserve: "scratch": what libraries take beside a step, measured here, has to fit the budget too.
    lean: each step in the cheapest way that fits the budget; training says the rest.
    width: of methods by name that narrow the model: "inner" keeps its residual stream, which blocks add to, whole.
    out: the run's folder. rounds: how many (the plan's, else 500).
    partition: a name as on the command line, or sample indices per device. devices: of the fleet (100).
    sizes: of the partitions iid and dirichlet, "lognormal:1"; without it devices have the same number of samples.
    training: how devices train; without it, as the plan says, with the data's own augmentation.
    optimizer: of devices, "sgd", "adam", "adamw" (the same as LocalTraining(update_rule=...); its learning rate is lr),
        or a function of (parameters, learning rate) (LocalTraining(optimizer=...)); what it keeps counts in the budget.
    resume: continue in `out`, to the bits of a run that never stopped. from_round: from this round's checkpoint
        instead of the newest; later ones are removed.
    workers: worker processes, one per core; 0 does all work in this process. engine=Ray(...): on a Ray cluster.
    checkpoint_every: rounds between checkpoints. progress: show them on stderr.
    tensorboard, mlflow: write there too.
    callbacks: objects of classes made from strata.Callback (strata.runs.callbacks).
    adjusted: the method for each attempt at a round (a fleet's devices may change level).
    pretrained: the model's weights are trained ones, and a small model takes its part of them as they are.
    server: the server's optimizer, strata.federation.ServerOptimizer("adam", 0.01).
    request: kept in config.json beside the settings.
    The model itself is not changed. `options`:
    """
    if os.environ.get(IN_WORKER):
        raise BadInput(
            "strata.run was called while a worker process imported your script: put the call under "
            "`if __name__ == '__main__':`"
        )
    check_float32(model)  # before its graph is made
    training = complete(_as_planned(training, method, data), data)
    if isinstance(optimizer, str):
        training = replace(training, update_rule=optimizer)
    elif optimizer is not None:
        training = replace(training, optimizer=optimizer)
    if training.is_adam:
        options = {"lr": ADAM_LR, **options}
    check_planned(method, training)
    kind = class_of(method)
    if isinstance(method, str | type):  # those of its card may be given as keywords
        own = {key: options.pop(key) for key in kind.card.options if options.get(key) is not None}
    else:
        own = {key: getattr(method, key, None) for key in kind.card.options}
    whole = prepared_model(kind, model, data.inputs, options.get("seed", 0), own)
    if isinstance(method, str | type):
        method = method_named(
            method,
            ChannelGraph(whole, data.inputs, width=width),
            constraints=several(constraint),
            budgets=several(budget),
            execution=settled(training, rounds or DEFAULT_ROUNDS).in_round(0),
            rounds=rounds or DEFAULT_ROUNDS,
            seed=options.get("seed", 0),
            model_name=type(model).__name__,
            reserve=reserve,
            lean=lean,
            pretrained=pretrained,
            **own,
        )
    elif lean:
        raise BadInput("the method already knows how its steps are executed: give lean with a method's name only")
    elif constraint is not None or budget is not None or reserve is not None:
        raise BadInput("the method already knows what devices can hold: give a constraint or budget with a name only")
    if kind.card.name == AUTO:
        options = {"warmup": warmup_of(rounds or DEFAULT_ROUNDS), **options}
    settings = RunOptions.of(**_known(options), rounds=_rounds(method, rounds), devices=_devices(partition, devices))
    training = settled(training, settings.course.rounds)
    budgets = [parse_bytes(size) for size in several(budget)]
    stragglers, deadline = settings.fleet.stragglers, settings.fleet.deadline
    if parse_stragglers(stragglers)[0] and deadline is None and not resume:
        raise BadInput("stragglers matter only where they can come too late: give a deadline, such as 2, as well")
    prepared = Prepared(
        model=whole,
        data=data,
        method=method,
        options=settings,
        training=training,
        server=server or ServerOptimizer(),
        partition=partition,
        sizes=sizes,
        engine=engine,
        adjusted=adjusted,
        pretrained=pretrained,
        plain=model,
        allowance=Allowance.of(method, training.in_round(0), budgets, several(constraint)),
    )
    return carry_out(
        prepared,
        Path(out),
        workers=workers,
        checkpoint_every=checkpoint_every,
        resume=resume,
        from_round=from_round,
        progress=progress,
        callbacks=[*callbacks, *trackers(tensorboard, mlflow)],
        request=request,
    )


run.__doc__ = (run.__doc__ or "") + "".join(
    f"\n    {key}: {help_text(one)}" for key, one in RunOptions.described().items() if key not in ("rounds", "devices")
)


@dataclass(frozen=True)
class Prepared:
    """All that a run is made of."""

    model: nn.Module
    data: FederatedData
    method: Method
    options: RunOptions
    training: LocalTraining  # from `complete`
    server: ServerOptimizer
    partition: Partitions
    sizes: str | None = None  # of the devices' shares, where the partition is by name
    engine: Engine | Ray | None = None  # None: workers of its own on this machine
    adjusted: Callable[[Method, int], Method] | None = None
    present: Callable[[int, int], Present] | None = None  # who is there in a round and attempt; None: always all
    pretrained: bool = False
    plain: nn.Module | None = None  # the user's model, where the method has added to it
    allowance: Allowance | None = None  # what devices may hold, where that was said
    notes: tuple[str, ...] = ()  # to be said when the run begins


def carry_out(
    prepared: Prepared,
    out: Path,
    *,
    workers: int | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    from_round: int | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    request: Mapping[str, Any] | None = None,
) -> Result:
    """The run itself. What is wrong is said before anything is written."""
    model, data, method, options = prepared.model, prepared.data, prepared.method, prepared.options
    training, plain = settled(prepared.training, options.course.rounds), prepared.plain or prepared.model
    if options.course.exact:  # the reference: as a device of its own trains
        training = replace(training, kernels=False)
    training = replace(training, shortened=not options.course.exact)
    if checkpoint_every < 1:
        raise BadInput(f"checkpoints are every 1 or more rounds, not every {checkpoint_every}")
    if from_round is not None and not resume:
        raise BadInput("from_round is where a run is resumed: give resume too, or leave it out")
    check_fit(method, model, data)
    check_last(method, options.course.rounds)
    check_hooks(method, options)
    check_phases(method, replace(training, objective=data.objective))
    check_norms(method, training, options.course.rounds, type(plain).__name__)
    held: Samples | None = None
    if options.evaluation.validation:
        check_renumbering(prepared.partition)
        data, held = hold_out(data, options.evaluation.validation, options.course.seed)
    parts = _partition(prepared.partition, prepared.sizes, data, options)
    workspace = Workspace(method.graph)
    settings = round_settings(prepared, parts, training, workspace)
    kept, kept_notes = _kept_prefixes(prepared, parts, training, workspace, out)
    settings = replace(settings, kept=kept)
    if settings.privacy:
        check_privacy(method, options)
    show = display(progress)
    listeners = Callbacks([show, *callbacks])
    engine, own_engine = prepared.engine, None
    if engine is None or isinstance(engine, Ray):  # before the folder: what cannot be sent to workers leaves no trace
        engine = own_engine = make_engine(model, data, training, workers, held=held, workspace=workspace, ray=engine)
    elif isinstance(engine, InlineEngine) and isinstance(engine.program, DeviceProgram):
        engine.program.workspace = engine.program.workspace or workspace  # one process needs one
    folder: RunFolder | None = None
    try:
        folder = RunFolder(out, _config_json(prepared, settings, training, request), resume, show.say)
        listeners.log = folder.say
        narrowed = narrowing(prepared.method, prepared.pretrained and not resume)
        told = (*data.notes, *prepared.notes, *unaugmented(training, data), *narrowed, *kept_notes)
        for note in told:
            folder.say(note)
        samples = {"test": len(data.test)} | ({"validation": len(held)} if held is not None else {})
        session = Session(
            method,
            options,
            settings,
            engine,
            folder,
            checkpoint_every,
            samples,
            listeners,
            pretrained=prepared.pretrained,
            objective=data.objective,
            to_plain=partial(plain_state, model, plain),
            allowance=prepared.allowance,
            from_round=from_round,
        )
        with Interrupts() as interrupts:
            return session.run(model, interrupts)
    finally:
        listeners.close()
        if own_engine is not None:
            own_engine.close()
        if folder is not None:
            if kept is not None:
                shutil.rmtree(kept.folder, ignore_errors=True)
            folder.close()


def _config_json(
    prepared: Prepared, settings: RoundSettings, training: LocalTraining, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What config.json holds. `settings` must be the same where the run is resumed."""
    model, method, options = prepared.plain or prepared.model, prepared.method, prepared.options
    return {
        "format": FORMAT,
        "settings": {
            "model": {"class": type(model).__name__, "structure": method.graph.hash},
            "data": folders.describe_data(prepared.data),
            "method": folders.describe_method(method),
            "partition": _partition_text(prepared.partition, settings.partition),
            **({} if prepared.sizes is None else {"sizes": prepared.sizes}),
            **({} if method.graph.width == "residual" else {"width": method.graph.width}),
            "training": folders.describe_training(training),
            **options.to_json(),
            "eval_every": options.evaluated_every,
            "server": dict(prepared.server.__dict__),
            "vectorised": None if settings.together is None else {"devices": COHORT, "widest": WIDEST},
        },
        "request": request,
        "versions": folders.versions(),
        "machine": folders.machine(),
        "commit": folders.commit(),
    }


def round_settings(
    prepared: Prepared, parts: Partition, training: LocalTraining, workspace: Workspace
) -> RoundSettings:
    """What a round needs to know."""
    options = prepared.options
    course, fleet, updates = options.course, options.fleet, options.updates
    # in a cohort, who else is there shows in the last bits
    alone = course.exact or options.private is not None or prepared.method.device_state is not None

    def together(jobs: Sequence[TrainJob]) -> list[list[int]]:
        return cohorts(workspace, [job.task for job in jobs], [len(job.samples) for job in jobs], training)

    return RoundSettings(
        fleet=options.simulated_fleet(),
        partition=parts,
        per_round=fleet.per_round,
        quorum=fleet.quorum,
        lr=lambda round: rate(round, course.rounds, course.lr, course.lr_end, course.warmup),
        seed=course.seed,
        epochs=training.epochs,
        weighted=updates.weighted,
        server=prepared.server,
        norm_bound=updates.norm_bound,
        together=None if alone else together,
        robust=options.robust,
        privacy=options.private,
        recomputed_flops=lambda cut, own: workspace.recomputed_flops(cut, own or training),
        adjusted=prepared.adjusted,
        present=prepared.present,
        largest_loss=prepared.data.objective.largest_loss,
        norms=_norms(prepared, training),
        norm_factor=updates.norm_factor or None,
        most_growth=MOST_GROWTH if getattr(parts, "elsewhere", False) else float("inf"),
        most_counted=_most_counted(updates.weight_cap, parts),
    )


def _kept_prefixes(
    prepared: Prepared, parts: Partition, training: LocalTraining, workspace: Workspace, out: Path
) -> tuple[KeptPrefixes | None, list[str]]:
    """Where devices keep outputs of frozen layers, and what is to be said of it."""
    if training.cache_prefix is None:
        return None, []
    from strata.engines.ray.engine import RayEngine  # without ray itself

    if isinstance(prepared.engine, Ray | RayEngine):
        raise BadInput("outputs of frozen layers are kept by workers of this machine and real devices, not on Ray")
    found = kept_phases(prepared.method, training, prepared.options.course.rounds, workspace)

    def each(task: Task) -> tuple[int, int]:
        settings = training.in_round(task.round)
        every = [workspace.placement(one.cut, one.execution or settings) for one in task.phases if settings.caches]
        known = [one for one in every if one is not None]
        return sum(one.cached_flops for one in known), max((one.cached_bytes or 0 for one in known), default=0)

    kept = KeptPrefixes(each, training.cache_prefix, out.resolve() / FOLDER)
    size, most = max(size for _, size in found), max(len(parts[device]) for device in range(len(parts)))
    whole = min(training.cache_prefix, most * size)
    return kept, [
        f"what frozen layers put out is kept on the devices' disks: {show_bytes(size)} a sample, up to "
        f"{show_bytes(whole)} on the device with the most samples"
    ]


def _most_counted(cap: float | None, parts: Partition) -> int | None:
    return None if cap is None else int(cap * median(len(parts[device]) for device in range(len(parts))))


def _norms(prepared: Prepared, training: LocalTraining) -> NormStatistics | None:
    if training.norm_statistics == "batch":
        return None
    return NormStatistics(prepared.method.graph, training, prepared.options.course.seed, prepared.options.calibration)


def _as_planned(
    training: LocalTraining | None, method: Method | str | type[Method], data: FederatedData
) -> LocalTraining | None:
    """A plan's bytes hold for its batches: they are taken where nothing is given, and larger ones are refused."""
    if not isinstance(method, SLT):
        return training
    plan = method.plan
    if training is None:
        return LocalTraining(**vars(plan.execution), augmentation=data.own_augmentation)
    planned, given = plan.execution.at_once, training.at_once
    if given > planned:
        raise BadInput(
            f"the plan counts {planned} samples at a time and training takes {given}, which needs more memory: give "
            f"LocalTraining(batch_size={planned}, ...), or make the plan with batch_size={given}"
        )
    segments = plan.execution.activation_checkpointing
    if plan.accounting == "peak" and segments not in (None, training.activation_checkpointing):
        raise BadInput(
            f"the plan counts activation checkpointing ({segments}) and training has "
            f"{training.activation_checkpointing or 'none'}, which may need more memory: give "
            f"LocalTraining(activation_checkpointing={segments!r}, ...), or make the plan as training has it"
        )
    for name in ("frozen_chunk", "release_gradients", "frozen_weights", "momentum_dtype"):
        planned_way, way = getattr(plan.execution, name), getattr(training, name)
        if plan.accounting == "peak" and planned_way not in (getattr(Execution(), name), way):
            raise BadInput(
                f"the plan counts {name} {planned_way} and training has {way}, which may need more memory: give "
                f"LocalTraining({name}={planned_way!r}, ...), or make the plan as training has it"
            )
    return training


def complete(training: LocalTraining | None, data: FederatedData) -> LocalTraining:
    """With the data's own augmentation (unless training is given), normalisation, and what this machine can do."""
    training = training or LocalTraining(augmentation=data.own_augmentation)
    training = replace(training, objective=data.objective)
    if not training.mean and training.preparation is None:
        training = replace(training, mean=data.train.mean, std=data.train.std)
    check_augmented(training, data)
    if training.kernels is None:  # decided here, once, and recorded: all workers do the same
        training = replace(training, kernels=kernels.available())
    elif training.kernels:
        kernels.require()
    return training


def settled(training: LocalTraining, rounds: int) -> LocalTraining:
    """With the round from which norm statistics are fixed."""
    after = training.fixed_after
    if training.norm_statistics != "fixed":
        return training
    if after is not None and after >= rounds:
        raise BadInput(
            f"statistics that are fixed after round {after} never are in a run of {rounds}: give a smaller one"
        )
    return replace(training, fixed_after=rounds // 2 if after is None else after)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    allowed = set(RunOptions.described()) - {"rounds", "devices"}
    unknown = sorted(set(options) - allowed)
    if unknown:
        named = {one.name for one in inspect.signature(run).parameters.values() if one.kind is one.KEYWORD_ONLY}
        raise BadInput(f"strata.run has no option {', '.join(unknown)}: there are {', '.join(sorted(allowed | named))}")
    return dict(options)


def _rounds(method: Method, rounds: int | None) -> int:
    plan = getattr(method, "plan", None)
    planned = plan.rounds if plan is not None else None
    if rounds is None:
        return planned or DEFAULT_ROUNDS
    if rounds < 1:
        raise BadInput(f"at least 1 round is needed, not {rounds}")
    if planned is not None and planned != rounds:
        raise BadInput(f"the plan is for {planned} rounds and the run for {rounds}: give both the same number")
    return rounds


def _devices(partition: Any, devices: int | None) -> int:
    if isinstance(partition, str):
        return 100 if devices is None else devices
    if devices is not None and devices != len(partition):
        raise BadInput(f"the partition is over {len(partition)} devices, not {devices}")
    return len(partition)


def _partition_text(partition: Partitions, parts: Partition) -> str:
    """By what it holds, where a file or a program says it: another one is noticed on resume."""
    by_name = isinstance(partition, str) and not partition.startswith("file:")
    return str(partition) if by_name else folders.describe_partition(parts)


def _partition(partition: Any, sizes: str | None, data: FederatedData, options: RunOptions) -> Partition:
    if isinstance(partition, str):
        parts = parse_partition(partition, data, options.fleet.devices, options.course.seed, sizes)
    elif sizes is not None:
        raise BadInput("your own partition says how many samples each device has: leave out sizes")
    else:
        parts = from_indices(partition, len(data.train)) if isinstance(partition, (list, tuple)) else partition
    check_range(parts, len(data.train))
    starts = getattr(parts, "starts", None)
    if starts is not None and (np.diff(starts) == 0).any():
        device = int(np.flatnonzero(np.diff(starts) == 0)[0])
        raise BadInput(f"device {device} of the partition has no samples; every device should have at least one")
    return parts
