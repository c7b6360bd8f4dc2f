"""What a device keeps from one of its rounds to the next, where a method wants it to keep something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from strata.methods.base import Task

Tensors = dict[str, "Tensor"]


@dataclass(frozen=True)
class DeviceState:
    """Runs where the device's work is done, so define it at the top level of a module. `kept` is what `after` returned
    in the device's last round that counted: empty in its first.
    """

    def before(self, task: Task, received: Tensors, kept: Mapping[str, Tensor]) -> Tensors:
        """What the device begins to train from, in the shapes of `received`."""
        return received

    def after(
        self, task: Task, received: Tensors, trained: Tensors, kept: Mapping[str, Tensor]
    ) -> tuple[Tensors, Tensors]:
        """What it sends, in the shapes of `trained` (task.cut.trained), and what it keeps."""
        return trained, dict(kept)


@dataclass(frozen=True)
class PersonalLayers(DeviceState):
    """Parameters that each device has for itself: it goes on with its own values, and the server's stay as they are.

    Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
    """

    names: tuple[str, ...]

    def before(self, task: Task, received: Tensors, kept: Mapping[str, Tensor]) -> Tensors:
        return {**received, **kept}

    def after(
        self, task: Task, received: Tensors, trained: Tensors, kept: Mapping[str, Tensor]
    ) -> tuple[Tensors, Tensors]:
        own = {name: tensor for name, tensor in trained.items() if name in self.names}
        return {**trained, **{name: received[name] for name in own}}, {**kept, **own}
