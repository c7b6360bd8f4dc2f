"""Your own data sets: any map-style Dataset, read once into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from strata.core.errors import BadInput
from strata.data.images import ImageSet, channel_statistics
from strata.data.objectives import Classification, Objective, classes_seen
from strata.data.partitions import from_indices
from strata.data.positions import NextToken, PerPosition
from strata.data.samples import FederatedData, Samples, hold_out

_SEED = 0  # of the samples that are held out: the same whatever the run's
IMAGE = "x"  # what an image is called that comes without a name


def wrap(
    train: Dataset[Any],
    test: Dataset[Any] | None = None,
    name: str = "custom",
    classes: int | None = None,
    augmentation: str = "none",
    users: Sequence[Sequence[int] | np.ndarray] | None = None,
    objective: Objective | None = None,
    test_share: float | None = None,
) -> FederatedData:
    """Any map-style Datasets of (image tensor [C, H, W], label): 8-bit images, as uint8 or as floats k / 255.

    Augmentation and normalisation belong to training, so give 8-bit images without random transforms. Others, 16-bit
    ones (torch.uint16, divided by 65535) and floats, are kept as float32 and reach the network as they are.
    In place of an image there may be a tensor of other dims, or a dict of tensors by the names of the model's inputs:
    they reach the network as they are. `objective`: None stands for classes, whole numbers from 0. `test_share`: with
    no test data, the share of the samples, such as 0.1, to test on, drawn by lot but always alike.
    """
    objective = objective or Classification()
    if (test is None) == (test_share is None):
        raise BadInput("give either a data set to test on, or with test_share=0.1 the share of the samples to test on")
    train_inputs, train_targets = _read(train, "training")
    test_inputs, test_targets = (train_inputs, train_targets) if test is None else _read(test, "test")
    _settle_images(train_inputs, test_inputs)
    if isinstance(objective, Classification):
        train_targets, test_targets = (_as_classes(targets) for targets in (train_targets, test_targets))
    indices = None
    if users is not None:
        checked = from_indices(users, len(train_targets))
        indices = [checked[device] for device in range(len(checked))]
    data = FederatedData(
        train=_samples(train_inputs, train_targets, train_inputs),
        test=_samples(test_inputs, test_targets, train_inputs),
        name=name,
        classes=_outputs(train_targets, test_targets, objective) if classes is None else classes,
        users=indices,
        augmentation=augmentation,
        objective=objective,
    )
    if test_share is None:
        return data
    rest, held = hold_out(data, test_share, _SEED)
    inputs = dict(rest.train.inputs)  # of images, mean and deviation are those of the samples that are left
    return replace(
        rest,
        train=_samples(inputs, rest.train.targets, inputs),
        test=_samples(dict(held.inputs), held.targets, inputs),
    )


def _settle_images(*parts: dict[str, Tensor]) -> None:
    """Images that were given as floats are 8-bit ones where all of them are: nothing is lost by it."""
    held = [part for part in parts if IMAGE in part and part[IMAGE].dim() == 4]
    floats = [part for part in held if part[IMAGE].is_floating_point()]
    if all(_is_8_bit(part[IMAGE]) for part in floats):
        for part in floats:
            if part[IMAGE].dtype != torch.uint8:  # one part may stand for both
                part[IMAGE] = (part[IMAGE].double() * 255).round().to(torch.uint8)
    elif len(floats) < len(held):
        raise BadInput("some images are 8-bit ones and others are not: give those to train and to test on in one form")
    elif any(part[IMAGE].dtype != torch.float32 for part in floats):
        raise BadInput(f"images are {floats[0][IMAGE].dtype}, and networks take float32: give image.float()")


def _is_8_bit(images: Tensor) -> bool:
    """Values k / 255, as exactly as their type can hold them."""
    for chunk in images.split(256):
        levels = chunk.double() * 255
        near = (levels - levels.round()).abs() <= 255 * torch.finfo(images.dtype).eps
        if not bool((near & (levels >= 0) & (levels <= 255)).all()):
            return False
    return True


def _samples(inputs: dict[str, Tensor], targets: Tensor, training: dict[str, Tensor]) -> Samples:
    """With the training images' mean and standard deviation, where an image is all there is."""
    images = inputs.get(IMAGE)
    if images is None or images.dtype != torch.uint8 or images.dim() != 4 or len(inputs) > 1:
        return Samples(inputs, targets)
    mean, std = channel_statistics(training[IMAGE])
    if targets.dtype == torch.int64 and targets.dim() == 1:
        return ImageSet(images, targets, mean, std)
    return Samples(inputs, targets, mean, std)


def _as_classes(targets: Tensor) -> Tensor:
    """Whole numbers of any width as int64; others stay what they are, to be refused."""
    if targets.is_floating_point() or targets.is_complex():
        return targets
    return targets.reshape(-1).to(torch.int64) if targets.numel() == len(targets) else targets


def _outputs(train: Tensor, test: Tensor, objective: Objective) -> int:
    """Classes that were seen, or numbers per sample."""
    by_position = isinstance(objective, PerPosition | NextToken)
    if train.dtype != torch.int64 or (train.dim() != 1 and not by_position):
        return train[0].numel()
    seen = torch.cat([train.flatten(), test.flatten()])
    if isinstance(objective, NextToken):  # of a vocabulary few may occur
        return int(seen.max()) + 1
    return classes_seen(seen, "classes=")


def _read(dataset: Dataset[Any], part: str) -> tuple[dict[str, Tensor], Tensor]:
    if not hasattr(dataset, "__len__"):
        raise BadInput(f"the {part} data set has no length; give a map-style Dataset with __len__ and __getitem__")
    count = len(dataset)
    if count == 0:
        raise BadInput(f"the {part} data set is empty")
    inputs: dict[str, Tensor] = {}
    targets: list[Tensor] = []
    for index in range(count):
        where = f"sample {index} of the {part} data set"
        try:
            given, target = dataset[index]
        except (TypeError, ValueError) as error:
            raise BadInput(f"{where} is not a pair (image tensor, label)") from error
        values = _inputs_of(given, where)
        for name, value in values.items():
            _check_numbers(value, name, where)
        if not inputs:
            inputs = {name: torch.empty((count, *value.shape), dtype=value.dtype) for name, value in values.items()}
        if values.keys() != inputs.keys():
            raise BadInput(f"{where} has the inputs {', '.join(values)}, the first one {', '.join(inputs)}")
        for name, value in values.items():
            if value.shape != inputs[name].shape[1:] or value.dtype != inputs[name].dtype:
                raise BadInput(
                    f"{where} has shape {tuple(value.shape)} ({value.dtype}), the first one "
                    f"{tuple(inputs[name].shape[1:])} ({inputs[name].dtype}); all should have one shape"
                )
            inputs[name][index] = value
        targets.append(_target(target, where))
        if targets[-1].shape != targets[0].shape:
            raise BadInput(f"{where} has a label of shape {tuple(targets[-1].shape)}; all labels should have one shape")
    _check_single(inputs)
    return inputs, torch.stack(targets)


def _inputs_of(given: Any, where: str) -> dict[str, Tensor]:
    if isinstance(given, dict) and given and all(isinstance(value, Tensor) for value in given.values()):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, Tensor):
        raise BadInput(f"{where} should be an image tensor [C, H, W], another tensor, or a dict of tensors by name")
    return {IMAGE: _image(given, where) if given.dim() == 3 else given}


def _check_numbers(value: Tensor, name: str, where: str) -> None:
    if value.is_complex() or (value.is_floating_point() and not bool(torch.isfinite(value).all())):
        what = "complex numbers" if value.is_complex() else "values that are not finite, such as NaN"
        raise BadInput(f"{where} has {what}{'' if name == IMAGE else f' in {name}'}: mend or leave out such samples")


def _check_single(inputs: dict[str, Tensor]) -> None:
    """Images of one input are settled by themselves: 8-bit ones may come in any precision."""
    for name, value in inputs.items():
        if value.is_floating_point() and value.dtype != torch.float32 and not (name == IMAGE and value.dim() == 4):
            raise BadInput(
                f"the input {name} is {str(value.dtype).removeprefix('torch.')}, and networks take float32: give "
                f"{name}.float()"
            )


def _target(given: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{where} has a label that is no number: {given!r:.80}") from error


def _image(image: Tensor, where: str) -> Tensor:
    if image.dtype == torch.uint16:
        return (image.to(torch.float64) / 65535).float()  # float32 tells all 65,536 values apart
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise BadInput(
            f"{where} is {image.dtype}; images should be uint8, uint16 or float, and other tensors of three dims need "
            "a name: give a dict"
        )
    return image
