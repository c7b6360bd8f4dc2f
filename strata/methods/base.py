"""What a method is: a rule that says which Cut each sampled device trains in this round. See docs/methods.md.

A method is a value. `assign` is a pure function of the method's settings, the round and the device, so a resumed run,
or one with another number of workers, gets the same tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from strata.core.errors import BadInput

if TYPE_CHECKING:
    from typing import Self

    from strata.graph import ChannelGraph, Cut


@dataclass(frozen=True)
class Task:
    """One device's work in one round: train `cut`. With `levels` (FjORD) each mini-batch trains one of them."""

    round: int
    device: int
    cut: Cut
    levels: tuple[Cut, ...] = ()  # nested in `cut`, smallest first, `cut` itself last


@dataclass(frozen=True)
class Method(ABC):
    """Subclass it, name it and say which cut a device trains; override the rest only where the method differs."""

    name: ClassVar[str]
    graph: ChannelGraph

    @abstractmethod
    def cut_for(self, round: int, device: int) -> Cut:
        """The part of the model that this device trains in this round."""

    def can_train(self, device: int) -> bool:
        """False: the method has no use for this device (it must not be sampled)."""
        return True

    @property
    def period(self) -> int | None:
        """Devices d and d + period get the same cut in every round; None: each device may have its own."""
        return None

    def assign(self, round: int, devices: Sequence[int]) -> list[Task]:
        """The tasks of the sampled devices, in their order."""
        return [Task(round, device, self.cut_for(round, device)) for device in devices if self.can_train(device)]

    def server_cut(self) -> Cut:
        """The part of the model that the server trains at all: full unless the method shrinks it."""
        return self.graph.full()

    def evaluation_cut(self, round: int) -> Cut:
        """What is evaluated after this round."""
        return self.server_cut()

    def step(self, round: int) -> int:
        """The step of the plan in this round; 0 for methods without steps."""
        return 0

    @property
    def needs_accuracy(self) -> bool:
        """While it is True, `observe` must hear of every round's accuracy, so every round is evaluated."""
        return False

    def observe(self, round: int, accuracy: float) -> Self:
        """The method after it saw this round's accuracy (early stopping); itself where accuracy decides nothing."""
        return self

    @property
    def state(self) -> dict[str, Any]:
        """What `observe` has learnt, as JSON: goes into the checkpoint."""
        return {}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """The method as it was when `state` was saved."""
        return self


@dataclass(frozen=True)
class Levels(Method):
    """A method that scales width: device d has the constraint (a width ratio in (0, 1]) number d % len(constraints)."""

    constraints: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", tuple(float(scale) for scale in self.constraints))
        if not self.constraints:
            raise BadInput("at least one constraint is needed, such as 0.25")
        for scale in self.constraints:
            if not 0 < scale <= 1:
                raise BadInput(f"a constraint is a width ratio above 0 and at most 1, not {scale:g}")

    def scale(self, device: int) -> float:
        return self.constraints[device % len(self.constraints)]

    @property
    def period(self) -> int | None:
        return len(self.constraints)

    @cached_property
    def prefixes(self) -> dict[float, Cut]:
        """The prefix cut of each level, smallest level first."""
        return {scale: self.graph.prefix(scale) for scale in sorted(set(self.constraints))}
