"""What devices may leave with the server until its app takes it: each a share of the memory, and all together.

Flower keeps whatever a registered device pushes until the app of the run has fetched it, or the run ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

EACH, ALL = 1 / 8, 1 / 2  # of the memory that the server's process may have
REMEMBERED = 1024  # objects, at least, before it is looked up which of them are still there


@dataclass
class StoredBytes:
    """Counts, by device, what is in the store. What the store has given out counts no more."""

    each: int
    all: int
    _kept: dict[str, tuple[int, int]] = field(default_factory=dict)  # object -> device, bytes
    _held: Counter[int] = field(default_factory=Counter)  # device -> bytes
    _coming: set[str] = field(default_factory=set)  # objects that are not in the store yet
    _remembered: int = REMEMBERED
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def within(cls, memory: int) -> StoredBytes:
        return cls(int(EACH * memory), int(ALL * memory))

    def take(self, device: int, name: str, size: int, store: Container[str]) -> bool | None:
        """Whether it was counted now; False: it was before. None: there is no room for it."""
        with self._lock:
            if name in self._kept:
                return False
            if not self._fits(device, size) or len(self._kept) >= self._remembered:
                self._look(store)
            if not self._fits(device, size):
                return None
            self._kept[name] = (device, size)
            self._held[device] += size
            self._coming.add(name)
            return True

    def settle(self, name: str, kept: bool) -> None:
        """What was counted is in the store now, or was not kept."""
        with self._lock:
            self._coming.discard(name)
            if not kept:
                device, size = self._kept.pop(name)
                self._held[device] -= size

    def _fits(self, device: int, size: int) -> bool:
        return self._held[device] + size <= self.each and self._held.total() + size <= self.all

    def _look(self, store: Container[str]) -> None:
        self._kept = {name: one for name, one in self._kept.items() if name in self._coming or name in store}
        self._held = Counter()
        for device, size in self._kept.values():
            self._held[device] += size
        self._remembered = max(REMEMBERED, 2 * len(self._kept))
