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
from strata.training.submodels import warm
from strata.training.trainer import Trainer

if TYPE_CHECKING:
    from strata.graph import ChannelGraph


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
    graph: ChannelGraph,
    task: Task,
    tensors: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    lr: float,
    seed: int,
) -> Update:
    """`tensors`: task.cut.extract(server state). `images` (uint8) and `labels`: the device's own. `seed`: the run's."""
    if len(labels) == 0:
        raise BadInput(f"device {task.device} has no samples: every device needs at least one")
    warm(graph, task.cut, settings.device).load(tensors)
    trainer = Trainer(graph, task, settings, lr)
    levels = generator(seed, "fjord level", task.round, task.device)
    total = 0.0
    dropout = seeded(settings.device, derive(seed, "dropout", task.round, task.device))
    with dropout, own_convolutions(settings.kernels):
        for x, y in batches(images, labels, settings, seed, task):
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
        samples=len(labels),
        loss=total / (settings.epochs * len(labels)),
        peak_bytes=peak_bytes(graph, task, images, labels, settings),
        cut_hash=task.cut.hash,
    )


def batches(
    images: Tensor, labels: Tensor, settings: LocalTraining, seed: int, task: Task
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every sample once per epoch, in random order; the last batch may be short."""
    order = generator(seed, "sample order", task.round, task.device)
    augmentation = generator(seed, "augmentation", task.round, task.device)
    for _ in range(settings.epochs):
        for index in torch.randperm(len(labels), generator=order).split(settings.batch_size):
            yield settings.augmented(images[index], augmentation), labels[index]
