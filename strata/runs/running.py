"""`strata.run`: a whole run, from its settings to model.safetensors, that can be stopped and resumed at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strata.core.errors import BadInput
from strata.core.interrupts import Interrupts
from strata.core.sizes import several
from strata.data import FederatedData, Partition, Samples, check_range, from_indices, hold_out, parse_partition
from strata.data.objectives import Classification
from strata.data.samples import same_inputs
from strata.engines import Engine, InlineEngine, LocalEngine, default_workers
from strata.engines.local import IN_WORKER
from strata.engines.ray import Ray
from strata.federation import privacy_accounting as accounting
from strata.federation.jobs import DeviceProgram, TrainJob, cuts_of
from strata.federation.privacy import Reach
from strata.federation.rounds import RoundSettings
from strata.federation.simulated_fleet import parse_stragglers
from strata.graph import ChannelGraph, Cut
from strata.methods import SLT, Method
from strata.methods.choice import class_of, method_named
from strata.methods.heads import plain_names, prepared
from strata.runs import description as describing
from strata.runs.folder import RunFolder
from strata.runs.options import DEFAULT_ROUNDS, Options
from strata.runs.progress import display
from strata.runs.session import Result, Session
from strata.runs.trackers import MLflow, TensorBoard, check_extras, started
from strata.training import COHORT, WIDEST, LocalTraining, Workspace, cohorts, cosine, kernels

if TYPE_CHECKING:
    from strata.methods import Method


def run(
    model: nn.Module,
    data: FederatedData,
    method: Method | str | type[Method],
    *,
    out: str | Path,
    constraint: float | Sequence[float] | None = None,
    budget: int | str | Sequence[int | str] | None = None,
    rounds: int | None = None,
    partition: str | Partition | Sequence[Sequence[int] | np.ndarray] = "iid",
    training: LocalTraining | None = None,
    devices: int | None = None,
    workers: int | None = None,
    engine: Engine | Ray | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    progress: bool = True,
    tensorboard: bool = False,
    mlflow: bool = False,
    request: Mapping[str, Any] | None = None,
    adjusted: Callable[[Method, int], Method] | None = None,
    pretrained: bool = False,
    **options: Any,
) -> Result:
    """Trains `model` over the fleet by `method` into the folder `out`.

    `method` is such as strata.SLT(plan), or a name or class with a `constraint` (0.25) or `budget` ("24 MiB"; several:
    levels).
    `options` are those of `Options` (per_round, seed, lr, quorum, dropout, ...). `resume=True` continues in `out` to
    the bits of a run that never stopped. `workers=0` does all work in this process, `engine=Ray(...)` on a Ray cluster
    (strata.engines.ray). `adjusted` gives the method for each attempt at a round (a fleet's devices may change level).
    With `pretrained` the model's weights are trained ones, and a small model takes its part of them as they are.
    The model itself is not changed.
    """
    if os.environ.get(IN_WORKER):
        raise BadInput("strata.run was called while a worker process imported your script: put the call under "
                       "`if __name__ == '__main__':`")  # fmt: skip
    training = complete(_as_planned(training, method, data), data)
    plain, model = model, prepared(class_of(method), model, data.inputs, options.get("seed", 0))
    if isinstance(method, str | type):
        method = method_named(
            method, ChannelGraph(model, data.inputs), constraints=several(constraint), budgets=several(budget),
            batch_size=training.batch_size, micro_batch=training.micro_batch, rounds=rounds or DEFAULT_ROUNDS,
            seed=options.get("seed", 0), model_name=type(plain).__name__, training=training,
        )  # fmt: skip
    elif constraint is not None or budget is not None:
        raise BadInput("the method already knows what devices can hold: give a constraint or budget with a name only")
    checked = Options(**_known(options), rounds=_rounds(method, rounds), devices=_devices(partition, devices))
    if checked.exact:  # the reference: as a device of its own trains
        training = replace(training, kernels=False)
    if parse_stragglers(checked.stragglers)[0] and checked.deadline is None and not resume:
        raise BadInput("stragglers matter only where they can come too late: give a deadline, such as 2, as well")
    if checkpoint_every < 1:
        raise BadInput(f"checkpoints are every 1 or more rounds, not every {checkpoint_every}")
    _check_fit(method, model, data)
    _check_last(method, checked.rounds)
    held: Samples | None = None
    description = describing.describe_data(data)
    if checked.validation:
        _check_renumbering(partition)
        data, held = hold_out(data, checked.validation, checked.seed)
    parts = _partition(partition, data, checked)
    _check_hooks(method, checked)
    # in a cohort, who else is there shows in the last bits
    alone = checked.exact or checked.privacy is not None or method.device_state is not None
    workspace = Workspace(method.graph)
    settings = RoundSettings(
        checked.fleet(), parts, checked.per_round, checked.quorum,
        lambda round: cosine(round, checked.rounds, checked.lr, checked.lr_end),
        checked.seed, training.epochs, checked.weighted, checked.server, checked.norm_bound,
        None if alone else lambda jobs: _together(workspace, jobs, training), checked.robust, checked.privacy,
        lambda cut: workspace.recomputed_flops(cut, training), adjusted, data.objective.largest_loss,
    )  # fmt: skip
    if checked.privacy:
        _check_privacy(method, checked)
    config = {
        "settings": {
            "model": {"class": type(plain).__name__, "structure": method.graph.hash},
            "data": description,
            "method": describing.describe_method(method),
            "partition": partition if isinstance(partition, str) else describing.describe_partition(parts),
            "training": describing.describe_training(training),
            **checked.to_json(),
            "vectorised": None if alone else {"devices": COHORT, "widest": WIDEST},
        },
        "request": request,
        "versions": describing.versions(),
        "commit": describing.commit(),
    }
    check_extras(tensorboard, mlflow)
    show = display(progress)
    own_engine: Engine | None = None
    if engine is None or isinstance(engine, Ray):  # before the folder: what cannot be sent to workers leaves no trace
        engine = own_engine = make_engine(model, data, training, workers, held=held, workspace=workspace, ray=engine)
    elif isinstance(engine, InlineEngine) and isinstance(engine.program, DeviceProgram):
        engine.program.workspace = engine.program.workspace or workspace  # one process needs one
    folder: RunFolder | None = None
    active = None
    try:
        folder = RunFolder(Path(out), config, resume, show.say)
        samples = {"test": len(data.test)} | ({"validation": len(held)} if held is not None else {})
        active = Session(method, checked, settings, engine, folder, checkpoint_every, samples, show,
                         pretrained=pretrained, objective=data.objective,
                         names=plain_names(model, plain))  # fmt: skip
        if tensorboard:
            active.trackers.append(started("TensorBoard", lambda: TensorBoard(folder.path)))
        if mlflow:
            active.trackers.append(started("MLflow", lambda: MLflow(folder.path.name, config["settings"])))  # type: ignore[arg-type]
        with Interrupts() as interrupts:
            return active.run(model, interrupts)
    finally:
        show.stop()
        for tracker in active.trackers if active else ():
            tracker.close()
        if own_engine is not None:
            own_engine.close()
        if folder is not None:
            folder.close()


def make_engine(
    model: nn.Module,
    data: FederatedData,
    training: LocalTraining,
    workers: int | None = None,
    *,
    held: Samples | None = None,
    workspace: Workspace | None = None,
    timeout: float | None = None,
    ray: Ray | None = None,
    source: Callable[[], Any] | None = None,
) -> Engine:
    """The engine for runs of this model on this data: the local one, or on `ray`; several runs may share one.

    `training` from `complete`, `held`: validation images. Worker processes begin to prepare at once.
    `source` makes `data` and `held` from files, for nodes of a cluster that have them too.
    """
    parts = {"test": data.test} | ({"validation": held} if held is not None else {})
    program = DeviceProgram(model, data.inputs, data.train, parts, training)
    if ray is not None:
        return _on_ray(program, ray, workers, source, timeout)
    workers = default_workers() if workers is None else workers
    if workers < 0:
        raise BadInput(f"workers are 0 (all in this process) or more, not {workers}")
    if workers == 0:
        program.workspace = workspace
        return InlineEngine(program)
    return LocalEngine(program, workers, shared=(Cut,), timeout=timeout)


def _on_ray(
    program: DeviceProgram, ray: Ray, workers: int | None, source: Callable[[], Any] | None, timeout: float | None
) -> Engine:
    from strata.engines.ray.engine import RayEngine

    device = program.training.device
    if device not in ("cpu", "cuda"):
        raise BadInput(f"on Ray each worker sees its own GPUs only: give the device cuda, not {device}")
    if (device == "cuda") != (ray.gpus > 0):
        raise BadInput(
            "on Ray the device cuda and a share of a GPU for each worker belong together: give both (--device cuda "
            "--ray-gpus 0.25, for example) or neither"
        )
    return RayEngine(program, ray, workers, cuts=cuts_of, source=source, shared=(Cut,), timeout=timeout)


def _as_planned(
    training: LocalTraining | None, method: Method | str | type[Method], data: FederatedData
) -> LocalTraining | None:
    """A plan's bytes hold for its batches: they are taken where nothing is given, and larger ones are refused."""
    if not isinstance(method, SLT):
        return training
    plan = method.plan
    if training is None:
        return LocalTraining(plan.batch_size, augmentation=data.augmentation, micro_batch=plan.micro_batch)
    planned, given = (one.micro_batch or one.batch_size for one in (plan, training))
    if given > planned:
        raise BadInput(
            f"the plan counts {planned} samples at a time and training takes {given}, which needs more memory: give "
            f"LocalTraining(batch_size={planned}, ...), or make the plan with batch_size={given}"
        )
    return training


def complete(training: LocalTraining | None, data: FederatedData) -> LocalTraining:
    """With the data's own augmentation (unless training is given), normalisation, and what this machine can do."""
    training = training or LocalTraining(augmentation=data.augmentation)
    training = replace(training, objective=data.objective)
    if not training.mean and training.preparation is None:
        training = replace(training, mean=data.train.mean, std=data.train.std)
    if training.transform is None and training.augmentation != "none" and not data.train.has_images:
        raise BadInput(
            f"the augmentation {training.augmentation} is for images, and {data.name} has none: leave it out"
        )
    if training.kernels is None:  # decided here, once, and recorded: all workers do the same
        training = replace(training, kernels=kernels.available())
    elif training.kernels:
        kernels.require()
    return training


def _together(workspace: Workspace, jobs: Sequence[TrainJob], training: LocalTraining) -> list[list[int]]:
    return cohorts(workspace, [job.task for job in jobs], [len(job.samples) for job in jobs], training)


def _check_privacy(method: Method, options: Options) -> None:
    accounting.check_installed()
    if method.graph.buffer_names and not options.validation:
        raise BadInput(
            "this model has batch norm, whose statistics must not come from the devices' images under differential "
            "privacy: give --validation SHARE (in Python, validation=0.05), images that the server keeps for itself"
        )
    Reach.of(method, 0, options.devices)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    allowed = set(Options.__dataclass_fields__) - {"rounds", "devices"}
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise BadInput(f"strata.run has no option {', '.join(unknown)}: there are {', '.join(sorted(allowed))}")
    return dict(options)


def _rounds(method: Method, rounds: int | None) -> int:
    plan = getattr(method, "plan", None)
    planned = plan.rounds if plan is not None else None
    if rounds is None:
        return planned or DEFAULT_ROUNDS
    if planned is not None and planned != rounds:
        raise BadInput(f"the plan is for {planned} rounds and the run for {rounds}: give both the same number")
    return rounds


def _devices(partition: Any, devices: int | None) -> int:
    if isinstance(partition, str):
        return 100 if devices is None else devices
    if devices is not None and devices != len(partition):
        raise BadInput(f"the partition is over {len(partition)} devices, not {devices}")
    return len(partition)


def _partition(partition: Any, data: FederatedData, options: Options) -> Partition:
    if isinstance(partition, str):
        parts = parse_partition(partition, data, options.devices, options.seed)
    else:
        parts = from_indices(partition, len(data.train)) if isinstance(partition, (list, tuple)) else partition
    check_range(parts, len(data.train))
    starts = getattr(parts, "starts", None)
    if starts is not None and (np.diff(starts) == 0).any():
        device = int(np.flatnonzero(np.diff(starts) == 0)[0])
        raise BadInput(f"device {device} of the partition has no samples; every device should have at least one")
    return parts


def _check_renumbering(partition: Any) -> None:
    """A validation split gives the training samples other numbers; a fleet's own samples have none here."""
    if not isinstance(partition, str) and not getattr(partition, "elsewhere", False):
        raise BadInput(
            "a validation split renumbers the training samples, and your own partition names them by the old numbers: "
            "leave out one of them, or give the partition as the data's users, with partition='user'"
        )


def _check_hooks(method: Method, options: Options) -> None:
    aggregates = type(method).aggregation is not Method.aggregation
    if aggregates and (options.robust or options.privacy or options.weighted):
        raise BadInput(
            f"{method.name} aggregates in its own way: leave out the aggregation, the weights and differential privacy"
        )


def _check_last(method: Method, rounds: int) -> None:
    """What is evaluated at the end becomes the plain model."""
    graph = method.graph
    output = method.evaluation_cut(rounds - 1).output
    if graph.output_named(output) != graph.output_named(None):
        raise BadInput(
            f"{method.name} evaluates {output} after the last round: the final model is evaluated by its own output, "
            f"{graph.output_named(None)}"
        )


def _check_fit(method: Method, model: nn.Module, data: FederatedData) -> None:
    graph = method.graph
    if graph.classes != data.classes and isinstance(data.objective, Classification):
        raise BadInput(
            f"the model has {graph.classes} outputs and {data.name} has {data.classes} classes: "
            f"make the model for {data.classes} classes"
        )
    if graph.classes != data.classes:
        raise BadInput(
            f"the model has {graph.classes} outputs and {data.name} has {data.classes} numbers to predict: make the "
            f"model for {data.classes} outputs"
        )
    if not same_inputs(graph.inputs, data.inputs):
        kind = " images" if data.train.has_images else ""
        raise BadInput(
            f"the model takes {graph.inputs} and {data.name} has {data.inputs}{kind}: make the model for {data.inputs}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shapes != dict(graph.state_shapes):
        raise BadInput("the method was made for another model than the one given: make both from the same model")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(f"the model's {name} is {kind} and runs train in float32: give model.float()")
