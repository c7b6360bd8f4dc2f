"""What a device does with its task: some epochs of SGD on its cut, then it sends back what it trained.

Everything random comes from (seed, round, device): the order of samples, augmentation, dropout, FjORD's levels. So an
update is the same bits in any process, whatever ran there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.seeds import derive, generator
from strata.methods.base import Task
from strata.training.kernels import own_convolutions
from strata.training.memory import peak_bytes
from strata.training.settings import LocalTraining, seeded
from strata.training.trainer import Trainer
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.data.samples import Batch, Samples


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


def train_device(
    workspace: Workspace,
    task: Task,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    settings: LocalTraining,
    lr: float,
    seed: int,
) -> Update:
    """`tensors`: task.cut.extract(server state). `samples`: the device's own. `seed`: the run's."""
    if len(samples) == 0:
        raise BadInput(f"device {task.device} has no samples: every device needs at least one")
    workspace.submodel(task.cut, settings.device).load(tensors)
    trainer = Trainer(workspace, task, settings, lr)
    levels = generator(seed, "fjord level", task.round, task.device)
    total = 0.0
    dropout = seeded(settings.device, derive(seed, "dropout", task.round, task.device))
    with dropout, own_convolutions(settings.kernels):
        for x, y in batches(samples, settings, seed, task):
            level = int(torch.randint(len(trainer.levels), (), generator=levels))
            total += trainer.step(x, y, level) * len(y)
    trainer.release()
    return Update(
        round=task.round,
        device=task.device,
        tensors={
            name: parameter.detach().clone(memory_format=torch.contiguous_format).cpu()
            for name, parameter in zip(task.cut.trained, trainer.parameters, strict=True)
        },
        samples=len(samples),
        loss=total / (settings.epochs * len(samples)),
        peak_bytes=peak_bytes(workspace, task, samples, settings),
        cut_hash=task.cut.hash,
    )


def batches(samples: Samples, settings: LocalTraining, seed: int, task: Task) -> Iterator[tuple[Batch, Tensor]]:
    """Every sample once per epoch, in random order; the last batch may be short."""
    order = generator(seed, "sample order", task.round, task.device)
    augmentation = generator(seed, "augmentation", task.round, task.device)
    for _ in range(settings.epochs):
        for index in torch.randperm(len(samples), generator=order).split(settings.batch_size):
            batch = tuple(tensor[index] for tensor in samples.tensors)
            yield settings.augmented(batch, augmentation), samples.targets[index]
