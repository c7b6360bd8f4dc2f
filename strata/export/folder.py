"""From a run's settings to a folder that the native device trains from: steps, some of the data, the program."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata.core.errors import BadInput, Infeasible
from strata.core.files import write_atomic
from strata.core.seeds import generator
from strata.data.objectives import Classification
from strata.export.manifest import StepProgram, read_manifest
from strata.export.native import PROGRAM, native_folder
from strata.export.step import export_step
from strata.graph import ChannelGraph
from strata.graph.inputs import taken_by
from strata.methods import method_class
from strata.methods.heads import prepared_model
from strata.methods.slt import SLT
from strata.models.weights import load_weights
from strata.planning.executions import FEWEST_NORMED
from strata.runs.folder import is_finished
from strata.runs.launch import load_data, make_method, make_model, make_training, own_options

if TYPE_CHECKING:
    from strata.data import FederatedData, Samples
    from strata.execution import Execution
    from strata.export.verify import Verification
    from strata.graph import Cut
    from strata.methods import Method
    from strata.runs.config import RunConfig
    from strata.training import LocalTraining

SAMPLES, TEST_SAMPLES = 2000, 1000  # beside the steps, at the most
AUGMENTATIONS = ("none", "cifar", "cifar-vflip", "pictures", "pictures-vflip")  # that the native device knows


@dataclass(frozen=True)
class Choice:
    """A step to export."""

    step: int
    steps: int
    cut: Cut
    execution: Execution


@dataclass(frozen=True)
class Exported:
    """A step as it was written, and what it takes to check it."""

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    graph: ChannelGraph = field(repr=False)
    cut: Cut = field(repr=False)
    execution: Execution
    program: StepProgram = field(repr=False)
    training: LocalTraining = field(repr=False)
    samples: Samples = field(repr=False)
    lr: float
    verification: Verification | None = None

    def verified(self, found: Verification) -> Exported:
        return replace(self, verification=found)

    @property
    def holds(self) -> bool:
        return self.verification is None or self.verification.holds

    def to_json(self) -> dict[str, Any]:
        checked = {} if self.verification is None else {"verification": self.verification.to_json()}
        about = {name: self.manifest[name] for name in ("step", "level", "batch", "micro_batch", "bytes")}
        return {"folder": str(self.folder), **about, **checked}


def export_folder(
    config: RunConfig, out: Path, step: int | str | None, level: int | None, samples: int | None, run: Path | None
) -> Iterator[Exported]:
    """A step at a time, as each is written. `step`: one, "all", or None for the first (of a `run` the last)."""
    if run is not None and not is_finished(run):
        raise BadInput(f"{run} is not finished, so it has no weights to export yet: finish it first")
    data = load_data(config)
    model = make_model(config, data)
    data = data.only(taken_by(model, data.inputs.names))
    if type(data.objective) is not Classification:
        raise BadInput(f"an exported step learns classes, and {data.name} is for {data.objective.name}")
    whole = prepared_model(
        method_class(config.approach.method), model, data.inputs, config.course.seed, own_options(config)
    )
    if run is not None:
        load_weights(whole, run / "model.safetensors")
    training = make_training(config, data)
    if data.train.has_images and training.augmentation not in AUGMENTATIONS:
        raise BadInput(
            f"the native device does not know the augmentation {training.augmentation}: give --augmentation "
            f"{', '.join(AUGMENTATIONS[:-1])} or {AUGMENTATIONS[-1]}"
        )
    method, training = fitting_method(config, ChannelGraph(whole, data.inputs, width=config.approach.width), training)
    chosen = choices(method, training, level)
    if step != "all":
        number = (len(chosen) - 1 if run is not None else 0) if step is None else int(step)
        if number >= len(chosen):
            raise BadInput(f"{method.name} has steps 0 to {len(chosen) - 1} here, so there is no step {number}")
        chosen = [chosen[number]]
    kept = write_data(data, out, samples or SAMPLES, config.course.seed)
    write_program(out)
    for one in chosen:
        about = {
            "model": config.problem.model,
            "method": method.name,
            "step": one.step,
            "steps": one.steps,
            "level": level,
            "data": {
                "name": data.name,
                "mean": list(training.mean),
                "std": list(training.std),
                "augmentation": training.augmentation if data.train.has_images else "none",
            },
            "lr": config.course.lr,
            "epochs": training.epochs,
        }
        made = export_step(method.graph, one.cut, whole.state_dict(), one.execution, about)
        folder = out / f"step-{one.step}"
        made.write(folder)
        manifest = read_manifest(folder)
        yield Exported(
            folder, manifest, method.graph, one.cut, one.execution, made, training, kept, config.course.lr
        )  # fmt: skip


def fitting_method(config: RunConfig, graph: ChannelGraph, training: LocalTraining) -> tuple[Method, LocalTraining]:
    """As asked for; or, where nothing fits the budget so and parts of a batch were not asked for, in the largest parts
    that do: the one way to save bytes that exported steps have."""
    asked, size = config.execution.micro_batch, config.execution.batch_size
    while True:
        try:
            return make_method(config, graph), replace(training, micro_batch=config.execution.micro_batch)
        except Infeasible:
            size = -(-size // 2)
            if asked is not None or size < FEWEST_NORMED:
                raise
            config = config.changed(micro_batch=size)


def choices(method: Method, training: LocalTraining, level: int | None) -> list[Choice]:
    """The steps of a method on devices of a level; most methods have one."""
    if isinstance(method, SLT):
        plan = method.plan
        if level is not None and level >= len(plan.levels):
            known = f"levels 0 to {len(plan.levels) - 1}" if plan.levels else "one budget, so no levels"
            raise BadInput(f"this plan has {known}: there is no level {level}")
        numbers = range(len(plan.steps))
        cuts = [(plan.cut(number, level), plan.execution_at(number, level)) for number in numbers]
        return [Choice(number, len(cuts), *one) for number, one in zip(numbers, cuts, strict=True)]
    phases = method.phases_for(0, level or 0)
    (phase, *further) = phases
    if further or phase.levels or phase.scaler is not None or phase.masked or phase.objective is not None:
        raise BadInput(
            f"devices of {method.name} do more in a round than train one cut by cross-entropy: such steps cannot be "
            "exported"
        )
    execution = phase.execution or method.execution_for(0, level or 0) or training.alone
    return [Choice(0, 1, phase.cut, execution)]


def write_data(data: FederatedData, out: Path, count: int, seed: int) -> Samples:
    """Some of the training samples, drawn at random, and of the test samples; the former are given back."""
    order = torch.randperm(len(data.train), generator=generator(seed, "exported samples"))[:count]
    train = data.train.subset(order.sort().values)
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, samples in (("train", train), ("test", data.test.subset(range(min(TEST_SAMPLES, len(data.test)))))):
        write_samples(out / "data" / f"{name}.safetensors", samples)
    return train


def write_samples(path: Path, samples: Samples) -> None:
    from safetensors.torch import save

    write_atomic(path, save({"inputs": stored(samples), "labels": samples.targets.contiguous()}))


def stored(samples: Samples) -> Tensor:
    """Grey pictures by their one channel."""
    (inputs,) = samples.tensors
    return (inputs[:, :1] if inputs.dim() == 4 and inputs.stride(1) == 0 else inputs).contiguous()


def write_program(out: Path) -> None:
    """pocket and the libraries that it needs, where they are built."""
    folder = native_folder()
    if folder is None:
        return
    for path in (folder / PROGRAM, *sorted(folder.glob("*.so"))):
        target = out / path.name
        target.unlink(missing_ok=True)  # it may be running, from another export
        shutil.copy(path, target)
