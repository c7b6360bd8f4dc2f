"""An exported step against torch: the native device trains by itself, and torch looks over its shoulder.

For every batch torch computes, in double precision and from the weights that the device has by then, the loss and the
step that SGD should take, with a device's draws of order and augmentation, and both are compared with what the device
found and did. Two trainings that go their own ways cannot be compared: where a value lies within rounding of zero its
ReLU lets a gradient through or not, and from such a batch on they part (tests/training/test_rounding.py). So the batch
that is furthest off is looked at with the device's own ReLUs (gates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strata.core.settings import settings_of
from strata.execution import Execution, training_forward
from strata.export.folder import stored
from strata.export.gates import Gates, with_its_relus
from strata.export.native import TOTAL, TRAINED, NativeStep, NativeTraining
from strata.methods.base import Task
from strata.training.loop import Draws, TaskSeeds, batches
from strata.training.settings import seeded
from strata.training.waiting import parts

if TYPE_CHECKING:
    from strata.data.samples import Batch, Samples
    from strata.export.folder import Exported
    from strata.training import LocalTraining

BATCHES = 20
LOSS = 1e-4  # of every batch, relative
UPDATE = 1e-3  # of what a batch changes, relative to its length, beside what float32 weights can show of it
ROUNDING = 1e-4  # from here on it is asked which ReLUs went the other way
MEAN = 0.2  # of the mean loss, where dropout draws other values and so no batch can be compared
MORE = 0.03  # bytes above the plan's; less does no device harm
EPSILON = 2.0**-24  # a weight in float32 is at most so far from itself, relatively

Parts = Sequence[tuple["Batch", Tensor]]  # inputs and labels, as a batch is taken


@dataclass(frozen=True)
class Verification:
    batches: int
    loss: float  # the largest difference of a batch's loss
    update: float  # the median difference of what a batch changed
    furthest: float  # the largest, with the device's own ReLUs
    flipped: int  # how many ReLUs of that batch are not those of double precision
    hidden: float  # how far off changes may seem because weights are float32: the same for every device
    mean: float  # the difference of the mean loss
    memory: float  # bytes against the plan's
    counted: bool  # whether the native device held what the manifest says, to the byte
    drops: bool  # dropout draws other values than torch's: then only the mean is compared

    @property
    def holds(self) -> bool:
        if self.drops:
            follows = self.mean <= MEAN
        else:
            follows = self.loss <= LOSS and max(self.update, self.furthest) <= UPDATE + self.hidden
        return follows and self.counted and self.memory <= MORE

    def __str__(self) -> str:
        verdict = "verified" if self.holds else "NOT verified"
        if self.drops:
            found = f"mean loss within {self.mean:.1%} (dropout draws other values)"
        else:
            relus = f" with {self.flipped} of its ReLUs the other way" if self.flipped else ""
            found = (
                f"each batch's loss within {self.loss:.0e} and what it changes within {self.update:.0e} in the median; "
                f"of the batch that is furthest off, {self.furthest:.0e}{relus}"
            )
        held = "" if self.counted else ", NOT as the manifest says"
        memory = f"memory {self.memory:+.1%} of the plan's{held}"
        return f"{verdict} against torch's double precision over {self.batches} batches: {found}; {memory}"

    def to_json(self) -> dict[str, Any]:
        names = (
            "batches", "loss", "update", "furthest", "flipped", "hidden", "mean", "memory", "counted", "drops", "holds"
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def verify(exported: Exported, most: int = BATCHES) -> Verification:
    """Trains up to so many batches."""
    execution = exported.execution
    count = min(len(exported.samples), most * execution.batch_size)
    samples = exported.samples.subset(range(count))
    seeds = TaskSeeds(order=11, augmentation=12, levels=13, dropout=14)
    own = {name: getattr(execution, name) for name in settings_of(Execution)}
    settings = replace(exported.training, **own, epochs=1, shortened=False, kernels=False)
    asked = NativeTraining(
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
    )
    size = exported.manifest["bytes"]
    found: list[float] = []
    with NativeStep.open(exported.folder) as step:
        weights = [step.read(TRAINED).astype(np.float64)]

        def watch(batch: int, batches: int, loss: float) -> bool:
            found.append(loss)
            weights.append(step.read(TRAINED).astype(np.float64))
            return False

        step.train(stored(samples).numpy(), samples.targets.numpy(), asked, watch)
        counted = step.bytes(TOTAL) == size["total"]

    reference = Reference(exported, settings, weights[0])
    updates = taken(weights, execution.momentum, exported.lr)
    drawn = draws(exported, settings, seeds, samples)
    losses, errors, hidden = [], [], []
    with seeded(settings.device, seeds.dropout):
        for before, batch, update in zip(weights, drawn, updates, strict=False):
            loss, wanted = reference.update(before, batch)
            losses.append(loss)
            hidden.append(shown_by_weights(before, exported.lr, wanted))
            errors.append(distance(update, wanted))
        worst = int(np.argmax(errors))
        furthest, flipped = errors[worst], 0
        drops = any(name.startswith("strata::dropout") for name in exported.manifest["operators"])
        if furthest > ROUNDING + hidden[worst] and not drops:
            again = partial(reference.under, weights[worst], drawn[worst])
            wanted, flipped = with_its_relus(updates[worst], again)
            furthest = distance(updates[worst], wanted)
    return Verification(
        batches=len(losses),
        loss=max(abs(one / own - 1) for one, own in zip(found, losses, strict=True)),
        update=float(np.median(errors)),
        furthest=furthest,
        flipped=flipped,
        hidden=hidden[worst],
        mean=abs(float(np.mean(found) / np.mean(losses)) - 1),
        memory=size["total"] / size["peak"] - 1,
        counted=counted,
        drops=drops,
    )


def taken(weights: Sequence[np.ndarray], momentum: float, lr: float) -> list[np.ndarray]:
    """What each batch added to SGD's momentum, by the weights before and after it."""
    velocities = [(before - after) / lr for before, after in itertools.pairwise(weights)]
    earlier = [np.zeros_like(velocities[0]), *velocities]
    return [own - momentum * before for own, before in zip(velocities, earlier, strict=False)]


def shown_by_weights(weights: np.ndarray, lr: float, update: np.ndarray) -> float:
    """How far off `taken` may be, relatively, because weights are float32: half a unit in the last place before and
    after, and the same of the batch before."""
    return 4 * EPSILON * float(np.linalg.norm(weights)) / lr / max(float(np.linalg.norm(update)), 1e-12)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-12))


def draws(exported: Exported, settings: LocalTraining, seeds: TaskSeeds, samples: Samples) -> list[Parts]:
    """The batches of an epoch as a device takes them."""
    return [
        list(zip(parts(x, exported.execution.at_once), y.split(exported.execution.at_once), strict=True))
        for x, y in batches(samples, settings, Draws.of(seeds, Task(0, 0, exported.cut)))
    ]


class Reference:
    """SGD on the cut's plain submodel, in double precision."""

    def __init__(self, exported: Exported, settings: LocalTraining, begun: np.ndarray) -> None:
        self.execution, self.settings, self.begun = exported.execution, settings, begun
        tensors = {name: one.clone() for name, one in exported.cut.extract(exported_state(exported)).items()}
        self.module = exported.graph.submodel(exported.cut, tensors).train().double()
        forward = training_forward(exported.graph, exported.cut, self.module, self.execution)
        self.forward = self.module if forward is None else partial(forward, self.module)
        own = dict(self.module.named_parameters())
        self.parameters = {name: own[name] for name in exported.program.names["trained"]}

    def update(self, weights: np.ndarray, batch: Parts) -> tuple[float, np.ndarray]:
        """The loss of a batch and what it adds to the momentum, from these weights."""
        self._write(weights)
        self.module.zero_grad()
        count = sum(len(targets) for _, targets in batch)
        total = 0.0
        for inputs, targets in batch:
            given = (one.double() if one.is_floating_point() else one for one in inputs)
            loss = self.settings.mean_loss(self.forward(*given), targets) * (len(targets) / count)
            loss.backward()
            total += loss.item()
        gradient = self._row({name: one.grad for name, one in self.parameters.items() if one.grad is not None})
        gradient += self.execution.proximal * (weights - self.begun)
        if self.execution.clip is not None:
            gradient *= min(1.0, self.execution.clip / (float(np.linalg.norm(gradient)) + 1e-6))
        return total, gradient + self.execution.weight_decay * weights

    def under(self, weights: np.ndarray, batch: Parts, gates: Gates) -> np.ndarray:
        with gates:
            return self.update(weights, batch)[1]

    def _row(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """In the order of the manifest."""
        return np.concatenate([tensors[name].detach().flatten().numpy() for name in self.parameters])

    @torch.no_grad()
    def _write(self, weights: np.ndarray) -> None:
        sizes = [one.numel() for one in self.parameters.values()]
        rows = torch.from_numpy(weights).split(sizes)
        for parameter, row in zip(self.parameters.values(), rows, strict=True):
            parameter.copy_(row.view_as(parameter))


def exported_state(exported: Exported) -> dict[str, Tensor]:
    """The whole model's tensors, with the step's in their places: what is outside the cut takes no part."""
    graph = exported.graph
    state = {
        name: torch.zeros(shape, dtype=graph.state_dtypes[name]) for name, shape in graph.state_shapes.items()
    }  # fmt: skip
    exported.cut.scatter(state, dict(exported.program.tensors))
    return state
