"""A simulated fleet: who is asked, who fails, who comes late. On a virtual clock, from the seed alone.

Virtual time: an ordinary device needs about 1 for its task (log-normal, sigma 0.1); a straggler SLOWDOWN times as
long. `deadline` is in that unit: with 2, whoever needs more than twice an ordinary device's time is too late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from strata.core.errors import BadInput
from strata.core.seeds import derive

JITTER = 0.1


@dataclass(frozen=True)
class SimulatedFleet:
    seed: int
    devices: int
    dropout: float = 0.0  # chance that a device fails in a round
    straggler_share: float = 0.0
    slowdown: float = 1.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise BadInput(f"a fleet has at least 1 device, not {self.devices}")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout is the share of devices that fail, from 0 to below 1, not {self.dropout:g}")
        if not (0 <= self.straggler_share <= 1 and 1 <= self.slowdown < math.inf):
            raise BadInput(
                f"stragglers are given as SHARE:SLOWDOWN with a share from 0 to 1 and a slowdown of at least 1, such "
                f"as 0.2:3, not {self.straggler_share:g}:{self.slowdown:g}"
            )
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise BadInput(
                f"the deadline is a number of an ordinary device's times, above 0, such as 2, not {self.deadline:g}"
            )

    def sample(
        self,
        round: int,
        attempt: int,
        count: int,
        asked: Collection[int] = (),
        usable: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """`count` distinct devices, none of those asked before in this round. Fewer if the fleet has no more.

        Draws with rejection, so that it costs no more in a fleet of a million; `usable` says whom the method can use.
        """
        random = self._random("sampling", round, attempt)
        taken = set(asked)
        chosen: list[int] = []
        tries = 20 * count if self.devices > 20 * (count + len(taken)) else 0
        for _ in range(tries):
            if len(chosen) == count:
                return chosen
            device = int(random.integers(self.devices))
            if device not in taken and (usable is None or usable(device)):
                taken.add(device)
                chosen.append(device)
        if len(chosen) < count:  # a small fleet, or few usable devices: go through all of it in random order
            for device in map(int, random.permutation(self.devices)):
                if len(chosen) == count:
                    break
                if device not in taken and (usable is None or usable(device)):
                    chosen.append(device)
        return chosen

    def sample_each(self, draws: np.ndarray, rate: float, usable: Callable[[int], bool] | None = None) -> list[int]:
        """Each device for itself, where its draw from (0, 1) is below `rate` (Poisson sampling)."""
        chosen = map(int, np.flatnonzero(draws < rate))
        return [device for device in chosen if usable is None or usable(device)]

    def fails(self, round: int, attempt: int, device: int) -> bool:
        return self.dropout > 0 and self._random("dropout", round, attempt, device).random() < self.dropout

    def is_straggler(self, device: int) -> bool:
        return self.straggler_share > 0 and self._random("straggler", device).random() < self.straggler_share

    def time(self, round: int, attempt: int, device: int) -> float:
        """Virtual time this device needs for its task."""
        noise = math.exp(JITTER * self._random("speed", round, attempt, device).standard_normal())
        return noise * (self.slowdown if self.is_straggler(device) else 1.0)

    def excuse(self, round: int, attempt: int, device: int) -> str | None:
        """Why nothing comes back from this device in time, or None."""
        if self.fails(round, attempt, device):
            return "dropped out"
        if self.deadline is not None:
            time = self.time(round, attempt, device)
            if time > self.deadline:
                return f"late: took {time:.2f}, deadline {self.deadline:g}"
        return None

    def _random(self, purpose: str, *numbers: int) -> np.random.Generator:
        return np.random.default_rng(derive(self.seed, f"fleet {purpose}", *numbers))


def parse_stragglers(text: str | None) -> tuple[float, float]:
    """'0.2:3' -> (0.2, 3.0)."""
    if text is None:
        return 0.0, 1.0
    try:
        share, slowdown = map(float, text.split(":"))
    except ValueError:
        raise BadInput(f"stragglers are given as SHARE:SLOWDOWN, such as 0.2:3, not {text!r}") from None
    return share, slowdown
