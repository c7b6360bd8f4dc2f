"""An exported step against torch: the same samples in the same order from the same weights, by both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strata.core.settings import settings_of
from strata.execution import Execution
from strata.export.folder import stored
from strata.export.native import TRAINED, NativeStep, NativeTraining
from strata.methods.base import Phase, Task
from strata.training import Workspace
from strata.training.loop import Draws, TaskSeeds, batches
from strata.training.settings import seeded
from strata.training.trainer import Trainer

if TYPE_CHECKING:
    from strata.export.folder import Exported

BATCHES = 20
FIRST = 1e-4  # of the first batch's loss, relative: before any step it differs by rounding alone
CURVE = 0.02  # of any batch's loss, relative to the first: rounding grows from step to step
UPDATE = 0.02  # of the update's length: that of the difference
DROPPED = 0.2  # of the mean loss, where dropout draws other values
LESS, MORE = -0.10, 0.03  # bytes against the plan's: less is welcome, and much less would be an error of counting


@dataclass(frozen=True)
class Verification:
    batches: int
    first: float
    curve: float
    update: float
    mean: float
    memory: float
    drops: bool

    @property
    def holds(self) -> bool:
        follows = self.mean <= DROPPED if self.drops else self._follows
        return follows and LESS <= self.memory <= MORE

    @property
    def _follows(self) -> bool:
        return self.first <= FIRST and self.curve <= CURVE and self.update <= UPDATE

    def __str__(self) -> str:
        verdict = "verified" if self.holds else "NOT verified"
        if self.drops:
            how = f"mean loss within {self.mean:.1%} (dropout draws other values than torch's)"
        else:
            how = f"loss within {self.curve:.2g} of the first batch's at every one, update within {self.update:.2%}"
        return f"{verdict} against torch over {self.batches} batches: {how}; memory {self.memory:+.1%} of the plan's"

    def to_json(self) -> dict[str, Any]:
        names = ("batches", "first", "curve", "update", "mean", "memory", "drops", "holds")
        return {name: getattr(self, name) for name in names}


def verify(exported: Exported, most: int = BATCHES) -> Verification:
    """Trains up to so many batches by each, with a device's draws of order and augmentation."""
    execution = exported.execution
    count = min(len(exported.samples), most * execution.batch_size)
    samples = exported.samples.subset(range(count))
    seeds = TaskSeeds(order=11, augmentation=12, levels=13, dropout=14)
    own = {name: getattr(execution, name) for name in settings_of(Execution)}
    settings = replace(exported.training, **own, epochs=1, shortened=False, kernels=False)
    tensors = {name: value.clone() for name, value in exported.cut.extract(exported_state(exported)).items()}
    phase = Phase(exported.cut)
    workspace = Workspace(exported.graph)
    workspace.submodel(exported.cut).load(tensors)
    trainer = Trainer(workspace, phase, settings, exported.lr)
    draws = Draws.of(seeds, Task(0, 0, exported.cut, (phase,)))
    losses = []
    with seeded(settings.device, seeds.dropout):
        for x, y in itertools.islice(batches(samples, settings, draws), most):
            losses.append(trainer.step(x, y))
    expected = dict(zip(exported.cut.trained, trainer.values(), strict=True))
    names = exported.program.names["trained"]
    begun = np.concatenate([tensors[name].flatten().numpy() for name in names])
    wanted = np.concatenate([expected[name].flatten().numpy() for name in names]) - begun
    found: list[float] = []
    with NativeStep.open(exported.folder) as step:
        step.train(
            stored(samples).numpy(),
            samples.targets.numpy(),
            NativeTraining(
                lr=exported.lr,
                batch=execution.batch_size,
                momentum=execution.momentum,
                weight_decay=execution.weight_decay,
                proximal=execution.proximal,
                clip=execution.clip or 0.0,
                seeds=(seeds.order, seeds.augmentation, seeds.dropout),
                augmentation=exported.manifest["data"]["augmentation"],
                mean=settings.mean,
                std=settings.std,
            ),
            lambda batch, batches, loss: bool(found.append(loss)),  # type: ignore[func-returns-value]
        )
        update = step.read(TRAINED) - begun
    size = exported.manifest["bytes"]
    off = np.abs(np.array(found) - np.array(losses))
    return Verification(
        batches=len(losses),
        first=float(off[0] / abs(losses[0])),
        curve=float(off.max() / abs(losses[0])),
        update=float(np.linalg.norm(update - wanted) / max(np.linalg.norm(wanted), 1e-12)),
        mean=abs(float(np.mean(found) / np.mean(losses)) - 1),
        memory=size["total"] / size["peak"] - 1,
        drops=any(name.startswith("strata::dropout") for name in exported.manifest["operators"]),
    )


def exported_state(exported: Exported) -> dict[str, torch.Tensor]:
    """The whole model's tensors, with the step's in their places: what is outside the cut takes no part."""
    graph = exported.graph
    state = {
        name: torch.zeros(shape, dtype=graph.state_dtypes[name]) for name, shape in graph.state_shapes.items()
    }  # fmt: skip
    exported.cut.scatter(state, dict(exported.program.tensors))
    return state
