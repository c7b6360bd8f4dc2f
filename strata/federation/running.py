"""`strata.run`: a whole run, from its settings to model.safetensors, that can be stopped and resumed at any moment."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file, save
from torch import Tensor, nn

from strata.cutting import Cut
from strata.data import FederatedData, ImageSet, Partition, from_indices, hold_out, parse_partition
from strata.engines import Engine, InlineEngine, LocalEngine, default_workers
from strata.engines.local import IN_WORKER
from strata.errors import BadInput
from strata.federation import describing
from strata.federation.aggregation import ServerOptimizer
from strata.federation.files import read_json, write_atomic
from strata.federation.fleet import Fleet, parse_stragglers
from strata.federation.folder import RunFolder, read_metrics
from strata.federation.interrupts import Interrupts
from strata.federation.program import DeviceProgram, evaluate, final_state
from strata.federation.progress import Silent, display
from strata.federation.rounds import RoundFailed, RoundSettings, play
from strata.federation.state import FederationState
from strata.federation.trackers import MLflow, TensorBoard, Tracker, check_extras
from strata.training import BN_MODES, Evaluation, LocalTraining, cosine

if TYPE_CHECKING:
    from strata.cutting import ChannelGraph
    from strata.methods import Method, Task

DEFAULT_ROUNDS = 500


@dataclass(frozen=True)
class Options:
    """Everything about a run that is not the model, the data or the method. Defaults are the paper's."""

    rounds: int = DEFAULT_ROUNDS
    devices: int = 100
    per_round: int = 10
    seed: int = 0
    lr: float = 0.1
    lr_end: float = 0.01
    quorum: int = 1
    dropout: float = 0.0
    stragglers: str | None = None  # SHARE:SLOWDOWN
    deadline: float | None = None  # in units of an ordinary device's time
    weighted: bool = False  # mean weighted by samples
    server: ServerOptimizer = ServerOptimizer()
    norm_bound: float | None = None
    eval_every: int | None = None  # None: 100 times in a run, each round in short ones
    bn: str = "re-estimated"
    validation: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BadInput(f"at least 1 round is needed, not {self.rounds}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise BadInput(f"the seed is a whole number of at least 0, not {self.seed}")
        if not 0 < self.lr_end <= self.lr < float("inf"):
            raise BadInput(f"the learning rate falls from lr to lr_end > 0, not from {self.lr:g} to {self.lr_end:g}")
        if self.bn not in BN_MODES:
            raise BadInput(f"bn is one of {', '.join(BN_MODES)}, not {self.bn!r}")
        if self.eval_every is None:
            object.__setattr__(self, "eval_every", max(1, self.rounds // 100))
        elif self.eval_every < 1:
            raise BadInput(f"evaluation is every 1 or more rounds, not every {self.eval_every}")
        if self.validation != 0 and not 0 < self.validation < 1:
            raise BadInput(
                f"validation is the share of training data to hold out, such as 0.05, not {self.validation:g}"
            )
        if self.norm_bound is not None and not self.norm_bound > 0:
            raise BadInput(f"the norm bound must be above 0, not {self.norm_bound:g}")

    def fleet(self) -> Fleet:
        share, slowdown = parse_stragglers(self.stragglers)
        return Fleet(self.seed, self.devices, self.dropout, share, slowdown, self.deadline)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "server": dict(self.server.__dict__)}


@dataclass(frozen=True)
class Result:
    """A finished run. Everything comes from its folder."""

    out: Path
    summary: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.summary["accuracy"])

    @property
    def loss(self) -> float:
        return float(self.summary["loss"])

    @property
    def per_class_accuracy(self) -> list[float | None]:
        return list(self.summary["per_class_accuracy"])

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.out)

    def state_dict(self) -> dict[str, Tensor]:
        """For `model.load_state_dict`."""
        return load_file(self.out / "model.safetensors")


@dataclass
class _Run:
    """The parts of a run while it runs."""

    method: Method
    options: Options
    rounds: RoundSettings
    engine: Engine
    folder: RunFolder
    checkpoint_every: int
    test_samples: int
    validation_samples: int
    show: Silent
    trackers: list[Tracker] = field(default_factory=list)
    last: Evaluation | None = None
    saved: int = -1

    def save(self, state: FederationState) -> None:
        if state.round != self.saved:
            self.folder.sync()
            self.folder.checkpoints.save(state)
            self.saved = state.round


def run(
    model: nn.Module,
    data: FederatedData,
    method: Method,
    *,
    out: str | Path,
    rounds: int | None = None,
    partition: str | Partition | Sequence[Sequence[int] | np.ndarray] = "iid",
    training: LocalTraining | None = None,
    devices: int | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    progress: bool = True,
    tensorboard: bool = False,
    mlflow: bool = False,
    request: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Trains `model` over the fleet by `method` (such as strata.SLT(plan)) into the folder `out`.

    `options` are those of `Options` (per_round, seed, lr, quorum, dropout, ...). `resume=True` continues in `out` to
    the bits of a run that never stopped. `workers=0` does all work in this process. The model itself is not changed.
    """
    if os.environ.get(IN_WORKER):
        raise BadInput("strata.run was called while a worker process imported your script: put the call under "
                       "`if __name__ == '__main__':`")  # fmt: skip
    checked = Options(**_known(options), rounds=_rounds(method, rounds), devices=_devices(partition, devices))
    if checkpoint_every < 1:
        raise BadInput(f"checkpoints are every 1 or more rounds, not every {checkpoint_every}")
    _check_fit(method, model, data)
    training = complete(training, data)
    held: ImageSet | None = None
    description = describing.describe_data(data)
    if checked.validation:
        data, held = hold_out(data, checked.validation, checked.seed)
    parts = _partition(partition, data, checked)
    settings = RoundSettings(
        checked.fleet(), parts, checked.per_round, checked.quorum,
        lambda round: cosine(round, checked.rounds, checked.lr, checked.lr_end),
        checked.seed, training.epochs, checked.weighted, checked.server, checked.norm_bound,
    )  # fmt: skip
    config = {
        "settings": {
            "model": {"class": type(model).__name__, "structure": method.graph.hash},
            "data": description,
            "method": describing.describe_method(method),
            "partition": partition if isinstance(partition, str) else describing.describe_partition(parts),
            "training": describing.describe_training(training),
            **checked.to_json(),
        },
        "request": request,
        "versions": describing.versions(),
        "commit": describing.commit(),
    }
    check_extras(tensorboard, mlflow)
    show = display(progress)
    own_engine: Engine | None = None
    if engine is None:  # before the folder: what cannot be sent to workers leaves no trace
        engine = own_engine = make_engine(model, data, training, workers, held=held, graph=method.graph)
    folder: RunFolder | None = None
    active = None
    try:
        folder = RunFolder(Path(out), config, resume, show.say)
        active = _Run(method, checked, settings, engine, folder, checkpoint_every, len(data.test),
                      len(held) if held is not None else 0, show)  # fmt: skip
        if tensorboard:
            active.trackers.append(TensorBoard(folder.path))
        if mlflow:
            active.trackers.append(MLflow(folder.path.name, config["settings"]))  # type: ignore[arg-type]
        with Interrupts() as interrupts:
            return _run(active, model, interrupts)
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
    held: ImageSet | None = None,
    graph: ChannelGraph | None = None,
    timeout: float | None = None,
) -> Engine:
    """The local engine for runs of this model on this data; several runs may share one.

    `training` from `complete`, `held`: validation images. Worker processes begin to prepare at once.
    """
    parts = {"test": data.test} | ({"validation": held} if held is not None else {})
    program = DeviceProgram(model, tuple(data.input_shape), data.train, parts, training)
    workers = default_workers() if workers is None else workers
    if workers < 0:
        raise BadInput(f"workers are 0 (all in this process) or more, not {workers}")
    if workers == 0:
        program.graph = graph
        return InlineEngine(program)
    return LocalEngine(program, workers, shared=(Cut,), timeout=timeout)


def complete(training: LocalTraining | None, data: FederatedData) -> LocalTraining:
    """With the data's own augmentation (unless training is given) and normalisation."""
    training = training or LocalTraining(augmentation=data.augmentation)
    if not training.mean and training.preparation is None:
        training = replace(training, mean=data.train.mean, std=data.train.std)
    return training


def _run(run: _Run, model: nn.Module, interrupts: Interrupts) -> Result:
    folder, options = run.folder, run.options
    method, state = _begin(run, model)
    summary_path = folder.path / "summary.json"
    if state.round >= options.rounds and summary_path.exists() and (folder.path / "model.safetensors").exists():
        folder.say(f"{folder.path} is finished: nothing to do")
        return Result(folder.path, _summary(folder))
    run.show.start(method.name, state.round, options.rounds)
    flops = _flops(method)
    try:
        while state.round < options.rounds:
            began = time.monotonic()
            with interrupts.allowed():
                after, costs = play(state, method, run.rounds, run.engine, flops, folder.log)
                accuracy, method = _judge(run, method, after)
            after = replace(after, method=method.state)
            record = _record(method, state.round, run.rounds.lr(state.round), accuracy, costs, began)
            folder.append(record)
            state = after
            if state.round % run.checkpoint_every == 0 or state.round == options.rounds:
                run.save(state)
            run.show.round(record)
            for tracker in run.trackers:
                tracker.round(record)
        with interrupts.allowed():
            return _finish(run, method, state)
    except KeyboardInterrupt:
        run.save(state)
        run.show.stop()
        folder.say(f"stopped after {state.round} of {options.rounds} rounds; continue with: {_how_to_resume(run)}")
        raise
    except RoundFailed as error:
        run.save(state)
        raise RoundFailed(f"{error}. {state.round} rounds are saved in {folder.path}") from error


def _begin(run: _Run, model: nn.Module) -> tuple[Method, FederationState]:
    folder = run.folder
    if folder.checkpoints.rounds():
        state = folder.checkpoints.load(folder.say)
        folder.truncate_metrics(state.round)
        run.saved = state.round
        if state.round < run.options.rounds:
            folder.say(f"resuming {folder.path} after {state.round} of {run.options.rounds} rounds")
        return run.method.with_state(state.method), state
    folder.truncate_metrics(0)
    plan = getattr(run.method, "plan", None)
    folder.write("plan.json", plan.to_json() if plan is not None else describing.describe_method(run.method))
    tensors = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
    state = FederationState(0, tensors, method=run.method.state)
    run.save(state)
    return run.method, state


def _judge(run: _Run, method: Method, after: FederationState) -> tuple[float | None, Method]:
    """Test accuracy where this round is due, and the method after it has seen how it does."""
    options, round = run.options, after.round - 1
    assert options.eval_every is not None
    cut = method.evaluation_cut(round)
    due = after.round % options.eval_every == 0 or after.round == options.rounds
    observed = run.validation_samples == 0 and method.needs_accuracy
    accuracy = None
    if due or observed:
        run.last = evaluate(
            run.engine, after.tensors, cut, run.test_samples, "test", options.bn, after.round, options.seed
        )
        accuracy = run.last.accuracy
    seen = accuracy
    if run.validation_samples and method.needs_accuracy:
        seen = evaluate(
            run.engine, after.tensors, cut, run.validation_samples, "validation", options.bn, after.round, options.seed
        ).accuracy
    return accuracy, method.observe(round, seen) if method.needs_accuracy and seen is not None else method


def _record(
    method: Method, round: int, lr: float, accuracy: float | None, costs: Mapping[str, Any], began: float
) -> dict[str, Any]:
    loss = costs["train_loss"]
    return {
        "round": round, "step": method.step(round), "lr": lr, "train_loss": loss, "accuracy": accuracy,
        **{key: costs[key] for key in
           ("upload_bytes", "download_bytes", "train_flops", "peak_bytes", "devices", "dropped")},
        "seconds": round_seconds(time.monotonic() - began),
    }  # fmt: skip


def round_seconds(seconds: float) -> float:
    return round(seconds, 3)


def _finish(run: _Run, method: Method, state: FederationState) -> Result:
    folder, options = run.folder, run.options
    cut = method.evaluation_cut(options.rounds - 1)

    def judged(part: str, samples: int, bn: str) -> Evaluation:
        return evaluate(run.engine, state.tensors, cut, samples, part, bn, state.round, options.seed)

    test = run.last or judged("test", run.test_samples, options.bn)
    data = save(final_state(run.engine, state.tensors, cut, options.seed))
    plain = test if options.bn == "re-estimated" else judged("test", run.test_samples, "re-estimated")
    records = read_metrics(folder.path)
    summary = {
        "method": method.name, "seed": options.seed, "rounds": options.rounds, "accuracy": test.accuracy,
        "loss": test.loss, "per_class_accuracy": list(test.per_class), "bn": test.bn,
        "model_accuracy": plain.accuracy,  # of model.safetensors in ordinary inference
        **({"validation_accuracy": judged("validation", run.validation_samples, options.bn).accuracy}
           if run.validation_samples else {}),
        **{key: sum(record[key] for record in records) for key in ("upload_bytes", "download_bytes", "train_flops")},
        "peak_bytes": max(record["peak_bytes"] for record in records),
        "dropped": sum(len(record["dropped"]) for record in records),
        "seconds": round_seconds(sum(record["seconds"] for record in records)),
        "model_sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    write_atomic(folder.path / "model.safetensors", data)
    folder.write("summary.json", summary)
    return Result(folder.path, summary)


def _summary(folder: RunFolder) -> dict[str, Any]:
    summary: dict[str, Any] = read_json(folder.path / "summary.json")
    return summary


def _how_to_resume(run: _Run) -> str:
    return f"strata run --resume {run.folder.path} (or strata.run(..., resume=True))"


def _flops(method: Method) -> Callable[[Task], int]:
    """FLOPs per training sample of a task; of FjORD's levels, the mean. Remembered per shape."""
    from strata.costs import flops

    known: dict[Any, int] = {}

    def of_cut(cut: Cut) -> int:
        key = (tuple(cut.shapes.values()), cut.frozen)
        if key not in known:
            known[key] = flops(method.graph, cut).train
        return known[key]

    def of_task(task: Task) -> int:
        levels = task.levels or (task.cut,)
        return sum(map(of_cut, levels)) // len(levels)

    return of_task


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
    starts = getattr(parts, "starts", None)
    if starts is not None and (np.diff(starts) == 0).any():
        device = int(np.flatnonzero(np.diff(starts) == 0)[0])
        raise BadInput(f"device {device} of the partition has no samples; every device should have at least one")
    return parts


def _check_fit(method: Method, model: nn.Module, data: FederatedData) -> None:
    graph = method.graph
    if graph.classes != data.classes:
        raise BadInput(
            f"the model has {graph.classes} outputs and {data.name} has {data.classes} classes: "
            f"make the model for {data.classes} classes"
        )
    if tuple(graph.input_shape) != tuple(data.input_shape):
        ours, theirs = ("x".join(map(str, shape)) for shape in (graph.input_shape, data.input_shape))
        raise BadInput(f"the model takes {ours} and {data.name} has {theirs} images: make the model for {theirs}")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shapes != dict(graph.state_shapes):
        raise BadInput("the method was made for another model than the one given: make both from the same model")
