"""How a device trains: the paper's settings as defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput, one_line
from strata.core.settings import setting
from strata.data.augmentation import augment, check_augmentation, draw
from strata.data.images import normalise
from strata.data.objectives import Classification, Objective
from strata.data.samples import Batch, is_images
from strata.execution.execution import Execution
from strata.execution.mapped import check_mapping
from strata.execution.measured import growth
from strata.execution.optimizers import Optimizer, new_optimizer
from strata.training.waiting import Waiting

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


@cache
def footprint_of(optimizer: OptimizerFactory) -> tuple[int, int]:
    """Tensors of a parameter's size that it keeps for each, and those that its step makes in passing; as steps show."""
    parameter = nn.Parameter(torch.zeros(64, 65))
    parameter.grad = torch.zeros(64, 65)
    made = optimizer([parameter], 0.1)
    made.step()
    kept = [value for value in made.state[parameter].values() if isinstance(value, Tensor)]
    slots = sum(value.shape == parameter.shape for value in kept)
    return slots, round(growth(made.step).tensors / parameter.nbytes)


@dataclass(frozen=True)
class LocalTraining(Execution):
    """How a step is taken (Execution) and what it is taken on. loss, optimizer, transform may be any functions; of a
    module's top level, so that workers can import them."""

    epochs: int = setting(1, "local epochs", metavar="N", least=1, whole=True)
    fixed_after: int | None = setting(
        None, "the first round of norm_statistics fixed; a run says half of its rounds", least=0, whole=True, since=2
    )
    augmentation: str = setting("none", "a name that strata.data.augment knows", metavar="NAME")
    loss: Loss | None = None  # None: the objective's
    optimizer: OptimizerFactory | None = None  # None: by update_rule, momentum, beta, eps and weight_decay
    mean: tuple[float, ...] = ()  # of the data's channels, for normalisation
    std: tuple[float, ...] = ()
    transform: Transform | None = None  # replaces augmentation and normalisation in training
    preparation: Preparation | None = None  # replaces normalisation in evaluation
    device: str = setting("cpu", "where the network runs, such as cuda; each kind has its own bits", metavar="NAME")
    # our own convolutions in simulation; None: a run decides it where it begins (yes where there is a C compiler)
    kernels: bool | None = None
    # whether lean steps are simulated by a shorter way (shortened.py): a run says so, real devices never do
    shortened: bool = False
    objective: Objective = Classification()  # of the data; a run takes it from there

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):  # lists are welcome, but settings are hashed
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        check_device(self.device)
        if self.optimizer is not None and self.momentum_dtype != "float32":
            raise BadInput("momentum_dtype is for Strata's own SGD: leave it out with an optimizer of your own")
        if self.optimizer is not None and self.is_adam:
            raise BadInput(f"give either an optimizer of your own or {self.update_rule}, not both")
        if self.maps:
            check_mapping()
            if self.device != "cpu":
                raise BadInput(f"frozen weights can be mapped for the cpu only, not for {self.device}: leave them out")
        if self.caches:
            if self.transform is not None or self.augmentation != "none":
                how = "a transform of your own" if self.transform is not None else f"augmentation {self.augmentation}"
                raise BadInput(
                    f"with {how} a sample is another one every time, so nothing of it can be kept: give --augmentation "
                    "none with --cache-prefix, or leave it out"
                )
            if self.device != "cpu":
                raise BadInput(f"outputs of frozen layers are kept for the cpu only, not for {self.device}")
        if self.transform is None:
            check_augmentation(self.augmentation)
        if self.transform is not None and self.preparation is None:
            raise BadInput("a transform for training needs a preparation for evaluation beside it: give both")

    def in_round(self, round: int) -> LocalTraining:
        """Before `fixed_after` each batch has its own norm statistics: there are no others yet."""
        if self.norm_statistics != "fixed" or round >= (self.fixed_after or 0):
            return self
        return replace(self, norm_statistics="batch", cache_prefix=None)

    @property
    def sums_in_momentum(self) -> bool:
        return self.optimizer is None and super().sums_in_momentum

    @property
    def slots(self) -> int:
        return super().slots if self.optimizer is None else footprint_of(self.optimizer)[0]

    @property
    def step_copies(self) -> int:
        if self.optimizer is None:
            return super().step_copies
        return max(footprint_of(self.optimizer)[1], 1 if self.proximal else 0)

    @property
    def waits_as_stored(self) -> bool:
        return self.transform is None

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

    def waiting(self, batch: Batch, generator: torch.Generator) -> Waiting:
        """The same for a mini-batch that is taken in parts. A function of the user's gets it whole, at once."""
        if self.transform is not None:
            return Waiting(self.augmented(batch, generator), (None,) * len(batch), self)
        drawn = tuple(draw(one, self.augmentation, generator) if is_images(one) else None for one in batch)
        return Waiting(batch, drawn, self)

    def prepared(self, batch: Batch) -> Batch:
        """A batch for evaluation."""
        if self.preparation is not None:
            return _together(self.preparation, batch)
        return tuple(normalise(one, self.mean, self.std) if is_images(one) else one for one in batch)

    def new_optimizer(self, parameters: list[nn.Parameter], lr: float, rates: Sequence[float] = ()) -> Optimizer:
        """Fresh each round: a device keeps nothing between rounds. `rates`: see training/trainer.py."""
        if self.optimizer is None:
            return new_optimizer(self, parameters, lr, rates)
        if any(rate != 1 for rate in rates):
            raise BadInput(
                "the scaler of heterofl and fedrolex is not known for an optimizer of your own: leave it out"
            )
        return self.optimizer(parameters, lr)


def _together(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """A function of the user's: of one input alone, or of all as a tuple."""
    return (function(batch[0]),) if len(batch) == 1 else tuple(function(batch))
