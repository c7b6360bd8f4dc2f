"""Who is summed with whom. All that train the same cut in one sum, as long as sums make sense.

Nobody can say which device spoilt a sum. So those that were in one are summed in the smallest groups that are allowed,
the worst of them together, until they were in one that is good. A liar costs the others a round or two, then mostly
those that are as often in bad sums as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WORST = 64


@dataclass
class SumGroups:
    fewest: int  # devices of a sum
    barred: dict[int, str] = field(default_factory=dict)  # known to have lied, and how
    scores: dict[int, int] = field(default_factory=dict)  # of those that were in bad sums

    def of(self, devices: Sequence[int], seed: str) -> tuple[list[list[int]], dict[int, str]]:
        """The sums of devices that train the same cut, and why the others are in none."""
        excused = {
            device: f"left out of this run's sums: it {self.barred[device]}"
            for device in devices
            if device in self.barred
        }
        there = [device for device in devices if device not in self.barred]
        doubtful = [device for device in there if device in self.scores]
        clean = [device for device in there if device not in self.scores]
        if len(clean) < self.fewest:
            doubtful, clean = there, []
        random.Random(seed).shuffle(doubtful)
        doubtful.sort(key=lambda device: -self.scores.get(device, 0))
        groups = [clean] if clean else []
        whole = len(doubtful) // self.fewest * self.fewest
        small = [doubtful[start : start + self.fewest] for start in range(0, whole, self.fewest)]
        if small:
            small[-1] += doubtful[whole:]
        else:
            few = f"{len(doubtful)} of its kind in this round, and a sum is over at least {self.fewest} devices"
            excused |= dict.fromkeys(doubtful, few)
            self._forgive(doubtful)
        return [sorted(group) for group in [*groups, *small]], excused

    def _forgive(self, devices: Iterable[int]) -> None:
        """By one step: who is left out must be able to come back."""
        for device in devices:
            score = self.scores.pop(device, 0) - 1
            if score > 0:
                self.scores[device] = score

    def good(self, devices: Iterable[int]) -> None:
        for device in devices:
            self.scores.pop(device, None)

    def bad(self, devices: Iterable[int]) -> None:
        for device in devices:
            self.scores[device] = min(2 * self.scores.get(device, 0) + 1, WORST)

    def failed(self, device: int) -> None:
        """Of a small sum each device is needed: who fails there, too, is summed with the worst. Else it may have its
        reasons."""
        if device in self.scores:
            self.bad([device])

    def bar(self, liars: Mapping[int, str]) -> None:
        self.barred |= liars
