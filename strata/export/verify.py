"""An exported step against torch, from the same weights on the same samples in the same order.

torch computes in double precision: its own float32 differs from that by more than the native kernels do (on pictures
with plain backgrounds by a percent of the gradient where channels are last, as a whole plane's ReLU flips). Rounding
grows from step to step in narrow networks, so every batch is also compared on its own, from torch's weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strata.core.settings import settings_of
from strata.execution import Execution, training_forward
from strata.export.folder import stored
from strata.export.native import TRAINED, NativeStep, NativeTraining
from strata.methods.base import Task
from strata.training.loop import Draws, TaskSeeds, batches
from strata.training.settings import seeded
from strata.training.waiting import Waiting

if TYPE_CHECKING:
    from strata.data.samples import Batch
    from strata.export.folder import Exported
    from strata.training import LocalTraining

BATCHES = 20
LOSS = 1e-4  # of each batch, from torch's weights: relative
GRADIENT = 1e-3  # the same of its gradient's length; in the median, because a ReLU may flip by rounding
MEAN = 0.2  # of the mean loss over the batches, each trained on by itself
LESS, MORE = -0.10, 0.03  # bytes against the plan's: less is welcome, and much less would be an error of counting


@dataclass(frozen=True)
class Verification:
    batches: int
    loss: float  # the largest difference of a batch's loss
    gradient: float  # the median difference of a batch's gradient
    mean: float  # the difference of the mean loss
    memory: float
    drops: bool  # dropout draws other values than torch's: then only the mean is compared

    @property
    def holds(self) -> bool:
        follows = self.drops or (self.loss <= LOSS and self.gradient <= GRADIENT)
        return follows and self.mean <= MEAN and LESS <= self.memory <= MORE

    def __str__(self) -> str:
        verdict = "verified" if self.holds else "NOT verified"
        each = f"each batch's loss within {self.loss:.0e} and gradient within {self.gradient:.0e}, "
        return (
            f"{verdict} against torch over {self.batches} batches: {'' if self.drops else each}mean loss within "
            f"{self.mean:.1%}{' (dropout draws other values)' if self.drops else ''}; memory {self.memory:+.1%} of the "
            "plan's"
        )

    def to_json(self) -> dict[str, Any]:
        names = ("batches", "loss", "gradient", "mean", "memory", "drops", "holds")
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
    reference = Reference(exported, tensors)
    draws = Draws.of(seeds, Task(0, 0, exported.cut))
    size = exported.manifest["bytes"]
    found: list[float] = []
    losses, loss_errors, gradient_errors = [], [0.0], [0.0]
    with NativeStep.open(exported.folder) as step, seeded(settings.device, seeds.dropout):
        for x, y in itertools.islice(batches(samples, settings, draws), most):
            taken, own_loss = reference.native(step, x, y)
            losses.append(reference.step(x, y, settings))
            loss_errors.append(abs(own_loss - losses[-1]) / abs(losses[-1]))
            gradient_errors.append(reference.gradient_error(taken))
        step.write(TRAINED, reference.row(reference.start))
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
    return Verification(
        batches=len(losses),
        loss=max(loss_errors),
        gradient=float(np.median(gradient_errors[1:])),
        mean=abs(float(np.mean(found) / np.mean(losses)) - 1),
        memory=size["total"] / size["peak"] - 1,
        drops=any(name.startswith("strata::dropout") for name in exported.manifest["operators"]),
    )


class Reference:
    """SGD on the cut's plain submodel, in double precision."""

    def __init__(self, exported: Exported, tensors: Mapping[str, torch.Tensor]) -> None:
        self.execution, self.lr = exported.execution, exported.lr
        self.module = exported.graph.submodel(exported.cut, tensors).train().double()
        forward = training_forward(exported.graph, exported.cut, self.module, self.execution)
        self.forward = self.module if forward is None else partial(forward, self.module)
        own = dict(self.module.named_parameters())
        self.parameters = {name: own[name] for name in exported.program.names["trained"]}
        self.start = {name: one.detach().clone() for name, one in self.parameters.items()}
        self.gradient = np.empty(0)
        self.momenta = {name: torch.zeros_like(one) for name, one in self.parameters.items()}

    def step(self, x: Batch | Waiting, y: torch.Tensor, settings: LocalTraining) -> float:
        """Of a batch, in its parts; returns its loss."""
        size = self.execution.at_once
        inputs = x.split(size) if isinstance(x, Waiting) else zip(*(one.split(size) for one in x), strict=True)
        self.module.zero_grad()
        total = 0.0
        for part, targets in zip(inputs, y.split(size), strict=True):
            taken = (one.double() if one.is_floating_point() else one for one in part)
            loss = settings.mean_loss(self.forward(*taken), targets) * (len(targets) / len(y))
            loss.backward()
            total += loss.item()
        gradients = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        self.gradient = self.row(gradients)
        self._descend(gradients)
        return total

    def row(self, tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
        """In the order of the manifest."""
        return np.concatenate([tensors[name].detach().flatten().numpy() for name in self.parameters])

    def native(self, step: NativeStep, x: Batch | Waiting, y: torch.Tensor) -> tuple[np.ndarray, float]:
        """The gradient and the loss that the native device finds for this batch, from the weights as they are now."""
        parts = list(x.split(len(y))) if isinstance(x, Waiting) else [x]
        begun = self.row(self.parameters).astype(np.float32)
        step.write(TRAINED, begun)
        inputs = torch.cat([part[0] for part in parts]).contiguous().numpy()
        plain = NativeTraining(lr=1.0, batch=len(y), momentum=0, weight_decay=0, order=np.arange(len(y)))
        loss = step.train(inputs, y.numpy(), plain)
        return begun.astype(np.float64) - step.read(TRAINED), loss

    def gradient_error(self, found: np.ndarray) -> float:
        return float(np.linalg.norm(found - self.gradient) / max(float(np.linalg.norm(self.gradient)), 1e-12))

    @torch.no_grad()
    def _descend(self, gradients: Mapping[str, torch.Tensor]) -> None:
        execution = self.execution
        for name, gradient in gradients.items():
            gradient.add_(self.parameters[name] - self.start[name], alpha=execution.proximal)
        if execution.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), execution.clip)
        for name, gradient in gradients.items():
            weight, momentum = self.parameters[name], self.momenta[name]
            momentum.mul_(execution.momentum).add_(gradient).add_(weight, alpha=execution.weight_decay)
            weight.sub_(momentum, alpha=self.lr)


def exported_state(exported: Exported) -> dict[str, torch.Tensor]:
    """The whole model's tensors, with the step's in their places: what is outside the cut takes no part."""
    graph = exported.graph
    state = {
        name: torch.zeros(shape, dtype=graph.state_dtypes[name]) for name, shape in graph.state_shapes.items()
    }  # fmt: skip
    exported.cut.scatter(state, dict(exported.program.tensors))
    return state
