"""What a device does with its task: some epochs of SGD on its cut, then it sends back what it trained.

Everything random comes from (seed, round, device): the order of samples, augmentation, dropout, FjORD's levels. So an
update is the same bits in any process, whatever ran there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.seeds import derive
from strata.methods.base import Phase, Task
from strata.training.kernels import own_convolutions
from strata.training.memory import peak_bytes
from strata.training.phases import settings_of
from strata.training.settings import LocalTraining, seeded
from strata.training.shortened import shortened
from strata.training.trainer import Trainer
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from pathlib import Path

    from strata.data.samples import Batch, Samples
    from strata.graph import Cut
    from strata.training.waiting import Waiting


@dataclass(frozen=True)
class Update:
    """What a device sends back: new values of the parameters it trained, and nothing else of the model."""

    round: int
    device: int
    tensors: dict[str, Tensor]  # in the cut's shapes
    samples: int
    loss: float  # mean over the samples it trained on, without the proximal term; NaN stays NaN
    peak_bytes: int
    cut_hash: str
    kept: dict[str, Tensor] | None = None  # what a simulated device keeps for its next round: it is not sent


def train_device(
    workspace: Workspace,
    task: Task,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    lr: float,
    seed: int | TaskSeeds,
    disk: Path | None = None,
) -> Update:
    """`tensors`: task.cut.extract(server state). `samples`: the device's own. `seed`: the run's, or what a real device
    is told of it. `disk`: its folder for what frozen layers put out; None: they run in every step."""
    if len(samples) == 0:
        raise BadInput(f"device {task.device} has no samples: every device needs at least one")
    draws = Draws.of(seed, task)
    own = dict(tensors)
    total = 0.0
    for phase in task.phases:
        here = None if phase.cut == task.cut else phase.cut.within(task.cut)
        chosen = settings_of(phase, settings, task.round)
        objective = chosen.objective.of_device(samples.targets, workspace.graph.classes)
        if objective is not chosen.objective:
            chosen = replace(chosen, objective=objective)
        total += _train_phase(workspace, phase, here, own, samples, chosen, lr, draws, disk)
        _put_back(workspace, objective.unheld, own, tensors)
    return Update(
        round=task.round,
        device=task.device,
        tensors={name: own[name] for name in task.cut.trained},
        samples=len(samples),
        loss=total / (settings.epochs * len(samples) * len(task.phases)),
        peak_bytes=peak_bytes(workspace, task, samples, settings),
        cut_hash=task.cut.hash,
    )


def _put_back(
    workspace: Workspace, rows: Sequence[int], own: dict[str, Tensor], received: Mapping[str, Tensor]
) -> None:
    """Rows of the classifier for classes that the device does not hold, which weight decay alone has moved."""
    for name in workspace.graph.classifier if rows else ():
        own[name] = own[name].clone()
        own[name][list(rows)] = received[name][list(rows)]


@dataclass(frozen=True)
class TaskSeeds:
    """All that is random in one device's task of one phase, as a real device is told it: not the run's seed, from which
    it would know who is asked when, and what others draw."""

    order: int
    augmentation: int
    levels: int
    dropout: int

    @classmethod
    def of(cls, seed: int, task: Task) -> TaskSeeds:
        purposes = ("sample order", "augmentation", "fjord level", "dropout")
        return cls(*(derive(seed, purpose, task.round, task.device) for purpose in purposes))


@dataclass(frozen=True)
class Draws:
    """All that is random in a task; each of its phases draws on from where the one before has stopped."""

    order: torch.Generator
    augmentation: torch.Generator
    levels: torch.Generator
    dropout: Iterator[int]  # a seed for each phase

    @classmethod
    def of(cls, seed: int | TaskSeeds, task: Task) -> Draws:
        seeds = seed if isinstance(seed, TaskSeeds) else TaskSeeds.of(seed, task)
        generators = (seeds.order, seeds.augmentation, seeds.levels)
        order, augmentation, levels = (torch.Generator().manual_seed(one) for one in generators)
        if isinstance(seed, TaskSeeds):
            return cls(order, augmentation, levels, iter((seeds.dropout,)))
        later = (derive(seed, "dropout", task.round, task.device, phase) for phase in count(1))
        return cls(order, augmentation, levels, chain((seeds.dropout,), later))


def _train_phase(
    workspace: Workspace,
    phase: Phase,
    here: Cut | None,
    tensors: dict[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    lr: float,
    draws: Draws,
    disk: Path | None = None,
) -> float:
    """The sum of its samples' losses; new values go into `tensors`. `here`: the phase's cut among these, None: all."""
    received = tensors if here is None else here.extract(tensors)
    settings, group = shortened(workspace, phase, settings)
    workspace.submodel(phase.cut, settings.device, settings.maps).load(received)
    trainer = Trainer(workspace, phase, settings, lr, group, disk)
    total = 0.0
    with seeded(settings.device, next(draws.dropout)), own_convolutions(settings.kernels):
        for x, y in batches(samples, settings, draws):
            level = int(torch.randint(len(trainer.levels), (), generator=draws.levels))
            total += trainer.step(x, y, level) * len(y)
    trainer.release()
    found = dict(zip(phase.cut.trained, trainer.values(), strict=True))
    if here is None:
        tensors |= found
    else:
        tensors |= {name: tensors[name].clone() for name in found}  # what was given stays as it is
        here.scatter(tensors, found)
    return total


def batches(samples: Samples, settings: LocalTraining, draws: Draws) -> Iterator[tuple[Batch | Waiting, Tensor]]:
    """Every sample once per epoch, in random order; the last batch may be short. One of several parts waits."""
    for _ in range(settings.epochs):
        for index in torch.randperm(len(samples), generator=draws.order).split(settings.batch_size):
            batch = tuple(tensor[index] for tensor in samples.tensors)
            made = settings.waiting if len(index) > settings.at_once else settings.augmented
            yield made(batch, draws.augmentation), samples.targets[index]
