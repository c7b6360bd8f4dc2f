"""The device's own data: all of a folder, or its part of a simulated split; and what it holds out for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from strata.core.errors import BadInput
from strata.core.seeds import derive
from strata.data import Objective, Reading, Samples, load, parse_partition
from strata.data.tokenizers import reading_for
from strata.fleet.protocol.settings import DeviceSettings


@dataclass(frozen=True)
class OwnData:
    train: Samples
    held: Samples | None
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: str
    labels: str  # which class has which number: see label_digest
    objective: Objective
    vocabulary: int | None = None
    padding: int | None = None

    def only(self, names: Sequence[str]) -> OwnData:
        """With these of its inputs."""
        held = None if self.held is None else self.held.only(names)
        return replace(self, train=self.train.only(names), held=held)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.spec.inputs[0].shape


def load_own_data(settings: DeviceSettings, model: str = "") -> OwnData:
    """`model`: its name; one of Hugging Face's brings its tokenizer."""
    reading = reading_for(Reading(**dict(settings.reading)), settings.data, model)
    if reading.tokenizer == "chars" and settings.data.startswith("text:"):
        raise BadInput(
            "by characters every device would number those of its own text: give --tokenizer bytes, or a folder that "
            "all devices and the server have"
        )
    data = load(settings.data, settings.data_dir, reading)
    if settings.partition is None:
        own = np.arange(len(data.train))
    else:
        own = parse_partition(settings.partition, data, settings.devices, settings.seed)[settings.index]
    kept, held = split(own, settings.hold_out, derive(settings.seed, "device hold-out", settings.index))
    if len(kept) == 0:
        raise BadInput(f"device {settings.name} has no samples to train on: every device needs at least one")
    train = data.train.subset(kept)
    return OwnData(
        train,
        data.train.subset(held) if len(held) else None,
        data.classes,
        tuple(data.train.mean),
        tuple(data.train.std),
        data.augmentation,
        label_digest(data.class_names),
        data.objective,
        data.vocabulary,
        data.padding,
    )


def label_digest(class_names: Sequence[str]) -> str:
    """Equal where the same classes have the same numbers; empty where classes have no names."""
    return hashlib.sha256(json.dumps(list(class_names)).encode()).hexdigest()[:16] if class_names else ""


def split(own: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(to train on, to evaluate on), both sorted. With a share above 0 and two samples, at least one on either side."""
    if share == 0:
        return own, own[:0]
    count = min(max(1, round(share * len(own))), len(own) - 1)
    order = np.random.default_rng(seed).permutation(len(own))
    return own[np.sort(order[count:])], own[np.sort(order[:count])]
