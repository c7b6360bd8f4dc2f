"""An exported step against torch, from the same weights on the same samples in the same order.

torch computes in double precision. Float32 differs from that by what it rounds, and by ReLUs: where a value lies within
rounding of zero its gradient is there or not, and in a narrow network one of a million moves the whole gradient by half
a percent (tests/training/test_rounding.py). From such a batch on, two trainings part. So every batch is compared on
its own, from torch's weights, and the curve of a whole training is to be as near to double precision's as that of
torch's float32.
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
from strata.export.native import TOTAL, TRAINED, NativeStep, NativeTraining
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
CURVE = 0.01  # of any batch's loss (in nats) when each trains by itself; or, where that is more,
PARTING = 3.0  # times what torch's own float32 is off
MEAN = 0.2  # of the mean loss, where dropout draws other values and so no batch can be compared
MORE = 0.03  # bytes above the plan's; less does no device harm


@dataclass(frozen=True)
class Verification:
    batches: int
    loss: float  # the largest difference of a batch's loss
    gradient: float  # the median difference of a batch's gradient
    curve: float  # the largest difference of a batch's loss, each trained by itself
    own_curve: float  # the same of torch in float32
    mean: float  # the difference of the mean loss
    memory: float  # bytes against the plan's
    counted: bool  # whether the native device held what the manifest says, to the byte
    drops: bool  # dropout draws other values than torch's: then only the mean is compared

    @property
    def holds(self) -> bool:
        if self.drops:
            follows = self.mean <= MEAN
        else:
            follows = self.loss <= LOSS and self.gradient <= GRADIENT and self.curve <= self.allowed
        return follows and self.counted and self.memory <= MORE

    @property
    def allowed(self) -> float:
        return max(CURVE, PARTING * self.own_curve)

    def __str__(self) -> str:
        verdict = "verified" if self.holds else "NOT verified"
        if self.drops:
            found = f"mean loss within {self.mean:.1%} (dropout draws other values)"
        else:
            found = (
                f"each batch's loss within {self.loss:.0e} and gradient within {self.gradient:.0e}, the curve of a "
                f"training within {self.curve:.1g} (torch's float32: {self.own_curve:.1g})"
            )
        held = "" if self.counted else ", NOT as the manifest says"
        memory = f"memory {self.memory:+.1%} of the plan's{held}"
        return f"{verdict} against torch over {self.batches} batches: {found}; {memory}"

    def to_json(self) -> dict[str, Any]:
        names = (
            "batches", "loss", "gradient", "curve", "own_curve", "mean", "memory", "counted", "drops", "holds"
        )  # fmt: skip
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
    reference, single = (Reference(exported, tensors, dtype) for dtype in (torch.float64, torch.float32))
    draws = Draws.of(seeds, Task(0, 0, exported.cut))
    size = exported.manifest["bytes"]
    found: list[float] = []
    losses, own_losses, loss_errors, gradient_errors = [], [], [0.0], [0.0]
    with NativeStep.open(exported.folder) as step, seeded(settings.device, seeds.dropout):
        for x, y in itertools.islice(batches(samples, settings, draws), most):
            taken, own_loss = reference.native(step, x, y)
            losses.append(reference.step(x, y, settings))
            own_losses.append(single.step(x, y, settings))
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
        counted = step.bytes(TOTAL) == size["total"]
    expected = np.array(losses)
    return Verification(
        batches=len(losses),
        loss=max(loss_errors),
        gradient=float(np.median(gradient_errors[1:])),
        curve=float(np.abs(np.array(found) - expected).max()),
        own_curve=float(np.abs(np.array(own_losses) - expected).max()),
        mean=abs(float(np.mean(found) / np.mean(losses)) - 1),
        memory=size["total"] / size["peak"] - 1,
        counted=counted,
        drops=any(name.startswith("strata::dropout") for name in exported.manifest["operators"]),
    )


class Reference:
    """SGD on the cut's plain submodel."""

    def __init__(self, exported: Exported, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.execution, self.lr, self.dtype = exported.execution, exported.lr, dtype
        own_tensors = {name: one.clone() for name, one in tensors.items()}
        self.module = exported.graph.submodel(exported.cut, own_tensors).train().to(dtype)
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
            taken = (one.to(self.dtype) if one.is_floating_point() else one for one in part)
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
