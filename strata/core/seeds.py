"""One random generator per purpose, from the run's seed: `generator(seed, "fd", round, device)`.

The same key gives the same numbers in any process, in any order, on any machine; nothing reads the global seed.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose; `numbers` are what it depends on, such as round and device."""
    key = repr((int(seed), purpose, *map(int, numbers)))  # not hash(): that differs between processes
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, purpose, *numbers))
