"""How a device trains: the paper's settings as defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput, one_line
from strata.data.augmentation import augment, check_augmentation
from strata.data.images import normalise
from strata.data.objectives import Classification, Objective
from strata.data.samples import Batch, is_images

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs [b, ...], targets [b, ...] -> mean loss of the batch
OptimizerFactory = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]  # trained parameters, learning rate
# what the samples hold (images: uint8 [b, C, H, W]) -> what the network takes; with several inputs, tuples of them
Transform = Callable[[Any, torch.Generator], Any]
Preparation = Callable[[Any], Any]  # the same for evaluation: nothing random


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels)


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(
            f"device {name!r} cannot be used here ({one_line(error, 200)}): give cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device {name!r} is not supported: give cpu, cuda or cuda:N")


@contextmanager
def seeded(device: str, seed: int) -> Iterator[None]:
    """What layers draw for themselves (dropout) comes from this seed; afterwards the generators are as before."""
    where = torch.device(device)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if where.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


@dataclass(frozen=True)
class LocalTraining:
    """loss, optimizer, transform may be any functions; of a module's top level, so that workers can import them."""

    batch_size: int = 32
    epochs: int = 1
    momentum: float = 0.9
    weight_decay: float = 1e-5
    proximal: float = 0.0  # FedProx's mu: adds mu/2 |w - w_received|^2 to the loss
    augmentation: str = "none"  # a name that strata.data.augment knows
    loss: Loss | None = None  # None: the objective's
    optimizer: OptimizerFactory | None = None  # None: SGD with the momentum and weight decay above
    mean: tuple[float, ...] = ()  # of the data's channels, for normalisation
    std: tuple[float, ...] = ()
    transform: Transform | None = None  # replaces augmentation and normalisation in training
    preparation: Preparation | None = None  # replaces normalisation in evaluation
    micro_batch: int | None = None  # samples at a time, gradients accumulated over the batch; batch norm sees only them
    device: str = "cpu"  # where the network runs, such as cuda; each kind of device has its own bits
    # "auto" or at most so many segments of the forward pass; backward computes all but the last anew (same bits)
    activation_checkpointing: int | str | None = None
    # our own convolutions in simulation; None: a run decides it where it begins (yes where there is a C compiler)
    kernels: bool | None = None
    objective: Objective = Classification()  # of the data; a run takes it from there

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # lists are welcome, but settings are hashed
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for name, least in (("batch_size", 1), ("epochs", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise BadInput(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.batch_size:
            raise BadInput(
                f"micro_batch must be within 1 and the batch size of {self.batch_size}, not {self.micro_batch}"
            )
        segments = self.activation_checkpointing
        if segments is not None and segments != "auto" and (not isinstance(segments, int) or segments < 2):
            raise BadInput(f"activation checkpointing takes auto or a number of segments from 2, not {segments!r}")
        for name in ("momentum", "weight_decay", "proximal"):
            value = getattr(self, name)
            if not value >= 0 or value == float("inf"):
                raise BadInput(f"{name} must be 0 or more, not {value!r}")
        check_device(self.device)
        if self.transform is None:
            check_augmentation(self.augmentation)
        if self.transform is not None and self.preparation is None:
            raise BadInput("a transform for training needs a preparation for evaluation beside it: give both")
        if self.momentum >= 1:
            raise BadInput(f"momentum must be below 1, not {self.momentum!r}")

    @property
    def by_objective(self) -> bool:
        """Whether the loss is the objective's, which is known for each sample."""
        own = self.loss is cross_entropy and self.objective == Classification()
        return self.loss is None or own

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of a batch: what training descends."""
        loss = self.loss or self.objective.mean_loss
        return loss(outputs, targets)

    def augmented(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A mini-batch for training. Of inputs that are no images nothing is changed."""
        transform = self.transform
        if transform is not None:
            return _together(lambda inputs: transform(inputs, generator), batch)
        return tuple(
            augment(one, self.augmentation, generator, self.mean, self.std) if is_images(one) else one for one in batch
        )

    def prepared(self, batch: Batch) -> Batch:
        """A batch for evaluation."""
        if self.preparation is not None:
            return _together(self.preparation, batch)
        return tuple(normalise(one, self.mean, self.std) if is_images(one) else one for one in batch)

    def new_optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Fresh each round: a device keeps nothing between rounds."""
        if self.optimizer is not None:
            return self.optimizer(parameters, lr)
        return torch.optim.SGD(parameters, lr, self.momentum, weight_decay=self.weight_decay, fused=True)


def _together(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """A function of the user's: of one input alone, or of all as a tuple."""
    return (function(batch[0]),) if len(batch) == 1 else tuple(function(batch))
