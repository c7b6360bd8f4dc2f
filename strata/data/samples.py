"""What devices hold: inputs of any kind, each with a target. A data set is a pair of these, plus who wrote which.

Images are one kind of input among others: a tensor of uint8 [N, C, H, W]. They stay uint8 until the batch, which is
augmented, scaled and normalised. Everything else goes to the network as it is, so token ids stay whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.data.objectives import Classification, Objective
from strata.data.positions import PerPosition
from strata.graph.inputs import Input, InputSpec

Batch = tuple[Tensor, ...]  # the inputs of some samples, in the order of the spec
Indices = np.ndarray | Tensor | Sequence[int]


def is_images(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 4


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs by the names of the model's forward parameters (of a single input the name does not matter).

    >>> Samples({"ids": torch.zeros(100, 16, dtype=torch.int64)}, torch.zeros(100, dtype=torch.int64))
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor
    mean: tuple[float, ...] = ()  # of the images' channels, where there are images: for normalisation
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs:
            raise BadInput("samples need at least one input")
        for name, tensor in self.inputs.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise BadInput(f"the input {name} should be a tensor whose first dim counts the samples")
            if len(tensor) != len(self.targets):
                raise BadInput(
                    f"there are {len(tensor)} of {name} but {len(self.targets)} targets; there should be one for each"
                )
        channels = {tensor.shape[1] for tensor in self.inputs.values() if is_images(tensor)}
        if len(self.mean) != len(self.std) or (self.mean and channels != {len(self.mean)}):
            raise BadInput("mean and std should have a value for each of the images' channels, or none")

    def __repr__(self) -> str:
        """One line, not what is in it."""
        return f"<{len(self)} samples of {self.spec}>"

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def tensors(self) -> Batch:
        """All inputs, in the order of the spec."""
        return tuple(self.inputs.values())

    @property
    def spec(self) -> InputSpec:
        """What a model takes of them: images arrive as floats."""
        return InputSpec(
            tuple(
                Input(name, tuple(tensor.shape[1:]), torch.float32 if is_images(tensor) else tensor.dtype, tensor.dtype)
                for name, tensor in self.inputs.items()
            )
        )

    @property
    def has_images(self) -> bool:
        return any(map(is_images, self.tensors))

    def subset(self, indices: Indices) -> Samples:
        index = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return self._with({name: _taken(tensor, index) for name, tensor in self.inputs.items()}, self.targets[index])

    def split(self, size: int) -> Iterator[Samples]:
        """Consecutive parts of at most this size: views, not copies."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self._with({name: tensor[part] for name, tensor in self.inputs.items()}, self.targets[part])

    def only(self, names: Sequence[str]) -> Samples:
        """With these of its inputs."""
        return self._with({name: self.inputs[name] for name in names}, self.targets)

    def _with(self, inputs: Mapping[str, Tensor], targets: Tensor) -> Samples:
        return Samples(inputs, targets, self.mean, self.std)


def _taken(tensor: Tensor, index: Tensor) -> Tensor:
    if is_images(tensor) and tensor.stride(1) == 0:  # grey: take one channel and expand again, a third of the bytes
        return tensor[:, :1][index].expand(-1, tensor.shape[1], -1, -1)
    return tensor[index]


@dataclass(frozen=True)
class FederatedData:
    """What a run needs. `users`: sample indices (into train) per writer where the data has writers, else None."""

    train: Samples
    test: Samples
    name: str
    classes: int  # how many outputs a model for this data has: classes, or with another objective numbers per sample
    users: list[np.ndarray] | None = None
    augmentation: str = "none"  # what suits this data's images in training; a name for strata.data.augment
    class_names: tuple[str, ...] = field(default=(), repr=False)
    objective: Objective = field(default_factory=Classification)  # what a model is to do with the inputs
    vocabulary: int | None = None  # of text: ids run from 0 to below it
    padding: int | None = None  # of text: the id that stands where a sample has none
    notes: tuple[str, ...] = ()  # what was left out or cut in reading it: said where a run begins

    def __post_init__(self) -> None:
        if self.train.spec != self.test.spec:
            raise BadInput(f"{self.name}: training samples are {self.train.spec} and test samples {self.test.spec}")
        for part, samples in (("training", self.train), ("test", self.test)):
            if len(samples) == 0:
                raise BadInput(f"{self.name}: there are no {part} samples")
            try:
                self.objective.check(samples.targets, (self.classes,))
            except BadInput as error:
                raise BadInput(f"{self.name}: {part} {error}") from None

    def __repr__(self) -> str:
        """One line, not its pixels."""
        users = "" if self.users is None else f", {len(self.users)} users"
        empty = f" ({self.unseen} without a sample)" if self.unseen else ""
        what = f"{self.classes} classes{empty}" if isinstance(self.objective, Classification) else repr(self.objective)
        samples = f"{len(self.train)} training and {len(self.test)} test samples of {self.inputs}"
        return f"<{self.name}: {samples}, {what}{users}>"

    @property
    def unseen(self) -> int:
        """Classes that neither part has a sample of."""
        if not isinstance(self.objective, Classification):
            return 0
        return max(0, self.classes - len(torch.cat([self.train.targets, self.test.targets]).unique()))

    @property
    def inputs(self) -> InputSpec:
        return self.train.spec

    @property
    def parted_by_augmentation(self) -> str | None:
        """Why crops and flips, which each image draws for itself, would part what belongs together; None: they do
        not."""
        images = [name for name, tensor in self.train.inputs.items() if is_images(tensor)]
        if len(images) > 1:
            return f"each of its images ({', '.join(images)}) would be cropped and flipped by itself"
        if images and (isinstance(self.objective, PerPosition) or self.train.targets.dim() > 2):
            return "its images would be cropped and flipped and their targets, one for each position, would not"
        return None

    @property
    def own_augmentation(self) -> str:
        """Where nothing else is asked for."""
        return self.augmentation if self.parted_by_augmentation is None else "none"

    def only(self, names: Sequence[str]) -> FederatedData:
        """With these of its inputs."""
        if tuple(names) == self.inputs.names:
            return self
        return replace(self, train=self.train.only(names), test=self.test.only(names))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of data with a single input, such as images."""
        if not self.inputs.single:
            raise BadInput(f"{self.name} has several inputs ({self.inputs}), so there is no one shape of them")
        return self.inputs.inputs[0].shape


def class_labels(samples: Samples, purpose: str) -> Tensor:
    """The targets, where they are classes."""
    if samples.targets.dim() != 1 or samples.targets.is_floating_point():
        raise BadInput(f"{purpose} goes by classes, and the targets of this data are none: choose iid, user or lazy")
    return samples.targets


def hold_out(data: FederatedData, fraction: float, seed: int) -> tuple[FederatedData, Samples]:
    """Take a random share of the training samples away for validation: (the rest, the validation samples)."""
    count = round(fraction * len(data.train))
    if not 0 < count < len(data.train):
        raise BadInput(
            f"a validation share of {fraction} takes {count} of {len(data.train)} training samples; "
            "it should leave at least one on either side, 0.05 for example"
        )
    order = np.random.default_rng([seed, 0x7A11]).permutation(len(data.train))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    users = None
    if data.users is not None:
        moved = np.full(len(data.train), -1, dtype=np.int64)
        moved[kept] = np.arange(len(kept))
        rest = [moved[user][moved[user] >= 0] for user in data.users]
        users = [user for user in rest if len(user) > 0]
    return replace(data, train=data.train.subset(kept), users=users), data.train.subset(held)
