"""Central differential privacy: what the server releases says little about any one device. See docs/security.md.

DP-FedAvg (McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018):
each device takes part with the same chance, for itself (Poisson sampling); its change is scaled down to an L2 norm of
at most `clip`; to every coordinate of the sum, whoever answered, Gaussian noise of deviation noise * clip is added;
then the sum is divided by a number that was fixed beforehand. One device more or less moves the sum by at most `clip`.

Cuts: what is noised is every coordinate that any device of the fleet might have been given in this round, and a
coordinate is divided by the number of devices expected to train it, at least 1. Both follow from the method, the
round and the size of the fleet; neither from who was sampled, nor from what came back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.seeds import derive

if TYPE_CHECKING:
    from strata.graph import Cut
    from strata.methods import Method

MOST_NOISE = 1e4  # above, nothing is left of what devices send
MOST_CLIP = 1e18  # noise of that many clips is still a finite float32
LEAST_NOISE = 0.1  # below, epsilon is in the thousands after some rounds
MOST_CUTS = 2_000  # to be gone through in every round, where each device has its own (seconds for ResNet20)


@dataclass(frozen=True)
class Privacy:
    noise: float  # standard deviation of the noise, in units of clip
    clip: float
    delta: float
    seed: int | None = None  # None: the operating system's randomness, never the same twice

    def __post_init__(self) -> None:
        if not LEAST_NOISE <= self.noise <= MOST_NOISE:
            raise BadInput(f"the noise of differential privacy is {LEAST_NOISE:g} to {MOST_NOISE:g} times the clip "
                           f"(about 1 is usual), not {self.noise:g}")  # fmt: skip
        if not 0 < self.clip <= MOST_CLIP:
            raise BadInput(f"the clip of differential privacy is the largest L2 norm of a device's change, above 0 and "
                           f"at most {MOST_CLIP:g}, not {self.clip:g}")  # fmt: skip
        if not 0 < self.delta < 1:
            raise BadInput(f"delta is a chance well below one in the number of devices, not {self.delta:g}")
        if self.seed is not None and self.seed < 0:
            raise BadInput(f"the seed of the noise is a whole number of at least 0, not {self.seed}")

    def uniform(self, count: int, purpose: str, *numbers: int) -> np.ndarray:
        """float64 strictly between 0 and 1. `purpose` and `numbers` matter only with a seed."""
        if self.seed is None:
            raw = os.urandom(8 * count)
        else:
            raw = np.random.default_rng(derive(self.seed, f"privacy {purpose}", *numbers)).bytes(8 * count)
        return ((np.frombuffer(raw, np.uint64) >> np.uint64(11)) + 0.5) * 2.0**-53

    def gaussian(self, shape: tuple[int, ...], *numbers: int) -> Tensor:
        """float64 with the deviation that the sum of changes needs."""
        draws = torch.from_numpy(self.uniform(math.prod(shape), "noise", *numbers))
        return torch.special.ndtri(draws).view(shape) * (self.noise * self.clip)


@dataclass(frozen=True)
class Reach:
    """What the fleet may train in a round: the distinct cuts, and how many devices have each."""

    cuts: Mapping[Cut, int]

    @classmethod
    def of(cls, method: Method, round: int, devices: int) -> Reach:
        period = devices if method.period is None else min(method.period, devices)
        if method.period is None and devices > MOST_CUTS:
            raise BadInput(
                f"with differential privacy the cuts of all {devices} devices must be known in every round, and "
                f"{method.name} gives each device its own: have at most {MOST_CUTS} devices, or use a method or "
                "variant with shared cuts (fd: --variant shared)"
            )
        cuts: dict[Cut, int] = {}
        for device in filter(method.can_train, range(period)):
            cut = method.cut_for(round, device)
            cuts[cut] = cuts.get(cut, 0) + len(range(device, devices, period))
        if not cuts:
            raise BadInput(f"{method.name} can use none of the {devices} devices")
        return cls(cuts)


class PrivateSum:
    """The round's clipped changes, added in task order; `means` adds the noise, once."""

    def __init__(self, state: Mapping[str, Tensor], reach: Reach, privacy: Privacy, rate: float, round: int) -> None:
        self._state, self._reach, self._privacy, self._round = state, reach, privacy, round
        self._rate = rate  # the chance of each device to take part
        trained = {name for cut in reach.cuts for name in cut.trained}
        self.sums = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in state.items() if n in trained}
        self.updates = 0
        self._released = False

    @property
    def changed(self) -> Iterable[str]:
        return self.sums

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        assert weight == 1.0, "numbers of samples are private"
        received = cut.extract(self._state)
        change = {name: tensor.double() - received[name].double() for name, tensor in update.items()}
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in change.values()))
        if not math.isfinite(norm):  # float64 values near their limit: no multiple of them is of any use
            change = {}
        factor = min(1.0, self._privacy.clip / norm) if norm > 0 else 1.0
        self.add_sum(cut, {name: tensor * factor for name, tensor in change.items()}, 1)

    def add_sum(self, cut: Cut, changes: Mapping[str, Tensor], devices: int) -> None:
        """Of changes that the devices have clipped themselves, where only their sum is known."""
        if cut not in self._reach.cuts:  # its coordinates might go without noise
            raise RuntimeError("a device trained a cut that the method did not foresee: nothing is released")
        for name, tensor in changes.items():
            spread = torch.zeros_like(self.sums[name])
            cut.scatter({name: spread}, {name: tensor})
            self.sums[name] += spread
        self.updates += devices

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, new value, which coordinates have one). A second draw of noise would undo the first."""
        if self._released:
            raise RuntimeError("a private sum is released once")
        self._released = True
        for number, name in enumerate(self.sums):
            holders = self._holders(name)
            noised = self.sums[name] + self._privacy.gaussian(tuple(holders.shape), self._round, number)
            value = self._state[name].double() + noised / (self._rate * holders).clamp(min=1.0)
            yield name, value.to(self._state[name].dtype), holders > 0

    def _holders(self, name: str) -> Tensor:
        """How many devices of the fleet have each coordinate in this round."""
        holders = torch.zeros_like(self.sums[name])
        for cut, devices in self._reach.cuts.items():
            if name in cut.trained:
                mine = torch.zeros_like(holders)
                cut.scatter({name: mine}, {name: torch.full(cut.shapes[name], float(devices), dtype=mine.dtype)})
                holders += mine
        return holders
