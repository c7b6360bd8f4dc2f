"""Which frozen layers a device already has, so that they are not sent (nor counted) again.

A device keeps the frozen layers of the last Cut it was given. It has a parameter if that Cut had it frozen, with the
same kept indices, and no round since has changed it on the server (another level of a heterogeneous fleet may still
train it). Memory: 14 bytes per device that ever took part, whatever the size of the fleet.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from strata.graph import Cut

MOST_SETS = 1024  # random cuts of weights that the user has frozen have no end of them: the rest counts as sent again


@lru_cache(maxsize=256)
def frozen_parts(cut: Cut) -> dict[str, str]:
    """Each frozen parameter and a digest of what is kept of it."""
    return {
        name: hashlib.sha256(repr(cut.kept.get(name)).encode()).hexdigest()[:8]
        for name in cut.shapes
        if name in cut.frozen
    }


@dataclass(frozen=True)
class Holdings:
    devices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # sorted
    rounds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # when each last took part
    sets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int16))  # and what it then held
    known_sets: tuple[dict[str, str], ...] = ()
    changed: Mapping[str, int] = field(default_factory=dict)  # parameter -> last round that changed it

    def download_bytes(self, device: int, cut: Cut, value_bytes: Mapping[str, int]) -> int:
        """What this device lacks of the Cut's parameters, whose values have these bytes each."""
        held, since = self._held(device)
        wanted = frozen_parts(cut)
        total = 0
        for name, each in value_bytes.items():
            if name not in cut.shapes:  # of another output than the one that is trained
                continue
            has = name in wanted and held.get(name) == wanted[name] and self.changed.get(name, -1) < since
            total += 0 if has else each * math.prod(cut.shapes[name])
        return total

    def has_frozen(self, device: int, cut: Cut) -> bool:
        """Whether its last Cut had the same frozen layers, and none has changed since."""
        held, since = self._held(device)
        wanted = frozen_parts(cut)
        return bool(wanted) and held == wanted and all(self.changed.get(name, -1) < since for name in wanted)

    def _held(self, device: int) -> tuple[dict[str, str], int]:
        place = int(np.searchsorted(self.devices, device))
        if place == len(self.devices) or self.devices[place] != device:
            return {}, -1
        return self.known_sets[int(self.sets[place])], int(self.rounds[place])

    def after(self, round: int, cuts: Mapping[int, Cut], changed: Iterable[str]) -> Holdings:
        """After a round in which these devices received these cuts and the server's `changed` parameters moved."""
        known = list(self.known_sets)
        devices, rounds, sets = self.devices, self.rounds, self.sets
        for device, cut in sorted(cuts.items(), key=lambda item: item[0]):
            parts = frozen_parts(cut)
            place = int(np.searchsorted(devices, device))
            there = place < len(devices) and devices[place] == device
            if not parts or (parts not in known and len(known) == MOST_SETS):
                if there:
                    devices, rounds, sets = (np.delete(array, place) for array in (devices, rounds, sets))
                continue
            if parts not in known:
                known.append(parts)
            number = known.index(parts)
            if there:
                rounds, sets = rounds.copy(), sets.copy()
                rounds[place], sets[place] = round, number
            else:
                devices = np.insert(devices, place, device)
                rounds = np.insert(rounds, place, round)
                sets = np.insert(sets, place, number)
        moved = {**self.changed, **dict.fromkeys(changed, round)}
        return replace(self, devices=devices, rounds=rounds, sets=sets, known_sets=tuple(known), changed=moved)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"devices": self.devices, "rounds": self.rounds, "sets": self.sets}

    def to_json(self) -> dict[str, Any]:
        return {"known_sets": list(self.known_sets), "changed": dict(self.changed)}

    @classmethod
    def load(cls, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> Holdings:
        return cls(
            arrays["devices"], arrays["rounds"], arrays["sets"], tuple(values["known_sets"]), dict(values["changed"])
        )
