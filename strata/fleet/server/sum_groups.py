"""Who is summed with whom, so that a sum that was spoilt can be told from the others, and in time who spoils them.

Of a sum nobody can say which device spoilt it. So devices are in several small sums, other ones each round, and who
was in a bad one is tested: first together with others like it, then alone among devices whose sums are good. Who
spoils that one too is left out for a while, longer each time; an honest device that was unlucky comes back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

COMPARABLE = 3  # sums: of two that differ, either may be the bad one
ALONE = 2  # bad sums in a row after which a device is tested alone
LEFT_OUT = 8  # groupings that a device sits out when it spoilt its test; doubled each time


@dataclass
class SumGroups:
    """`compared`: sums are held against each other, so there should be several of them; else all are in one."""

    fewest: int  # devices of a sum
    compared: bool = False
    barred: dict[int, str] = field(default_factory=dict)  # known to have lied, and how
    strikes: dict[int, int] = field(default_factory=dict)  # bad sums since the last good one
    tested: set[int] = field(default_factory=set)  # alone, in the sums that are being made
    failures: dict[int, int] = field(default_factory=dict)  # since a device was last in a sum
    sits_out: dict[int, int] = field(default_factory=dict)  # for so many groupings
    times: dict[int, int] = field(default_factory=dict)  # that a device was left out

    def excused(self, devices: Iterable[int]) -> dict[int, str]:
        """Who is not to be asked, and why. Once a round: who sits some out comes nearer its turn."""
        return {device: why for device in devices if (why := self._excuse(device)) is not None}

    def of(self, devices: Sequence[int], seed: str) -> list[list[int]]:
        """The sums of devices that train the same cut. None where there are too few."""
        there = sorted(devices)
        if len(there) < self.fewest:
            return []
        random.Random(seed).shuffle(there)
        there.sort(key=lambda device: -self.failures.get(device, 0))  # who may be lost is dealt evenly
        self.tested -= set(there)
        clean = [device for device in there if device not in self.strikes]
        doubtful = [device for device in there if device in self.strikes]
        groups = self._tests(clean, doubtful)
        too_few = len(doubtful) < self.fewest or len(clean) < self.fewest  # for sums of their own
        again = not groups and len(doubtful) < 2 * self.fewest and self._worst(doubtful) >= ALONE
        if too_few or again:  # the same sum once more would say nothing new
            clean, doubtful = [*clean, *doubtful], []
            groups += _split(clean, len(clean) // self.fewest if self.strikes else self._sums_of(len(clean)))
        else:
            groups += _split(clean, self._sums_of(len(clean)))
            groups += _split(doubtful, len(doubtful) // self.fewest)
        return [sorted(group) for group in groups]

    def _tests(self, clean: list[int], doubtful: list[int]) -> list[list[int]]:
        """Each of those with the most strikes alone among clean ones, of whom enough are left for a sum without it.
        Takes them from both lists."""
        groups = []
        for device in sorted(doubtful, key=lambda device: -self.strikes[device]):
            if self.strikes[device] < ALONE or len(clean) < 2 * self.fewest:
                break
            doubtful.remove(device)
            groups.append([device, *(clean.pop() for _ in range(self.fewest))])
            self.tested.add(device)
        return groups

    def _worst(self, devices: list[int]) -> int:
        return max((self.strikes[device] for device in devices), default=0)

    def _sums_of(self, devices: int) -> int:
        """Many small ones, because one liar spoils one; of T + 1 devices, so that one may be lost."""
        if not self.compared or devices < COMPARABLE * self.fewest:
            return 1
        return max(COMPARABLE, devices // (self.fewest + 1))

    def _excuse(self, device: int) -> str | None:
        if device in self.barred:
            return f"left out of this run's sums: it {self.barred[device]}"
        left = self.sits_out.get(device, 0)
        if not left:
            return None
        self.sits_out[device] = left - 1
        return "left out of this run's sums for a while: those that it was in were bad"

    def is_left_out(self, device: int) -> bool:
        return device in self.barred or self.sits_out.get(device, 0) > 0

    def good(self, devices: Iterable[int]) -> None:
        for device in devices:
            self.strikes.pop(device, None)
            self.failures.pop(device, None)

    def bad(self, devices: Iterable[int]) -> list[int]:
        """Who is left out from now on: the one that was tested, for whom the others of its sum are not blamed."""
        found = sorted(self.tested & set(devices))
        for device in found or devices:
            self.strikes[device] = self.strikes.get(device, 0) + 1
        for device in found:
            self.sits_out[device] = LEFT_OUT << self.times.get(device, 0)
            self.times[device] = min(self.times.get(device, 0) + 1, 16)
        return found

    def failed(self, device: int) -> None:
        """Of a small sum each device is needed: who fails there, too, is tested alone. Else it may have its reasons."""
        self.failures[device] = self.failures.get(device, 0) + 1
        if device in self.strikes:
            self.strikes[device] += 1

    def bar(self, liars: Mapping[int, str]) -> None:
        self.barred |= liars


def _split(devices: list[int], parts: int) -> list[list[int]]:
    """Sizes differ by at most one."""
    return [devices[part::parts] for part in range(parts)] if parts else []
