"""One random generator per purpose, from the run's seed: `generator(seed, "fd", round, device)`.

The same key gives the same numbers in any process, in any order, on any machine; nothing reads the global seed.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose; `numbers` (>= 0) are what it depends on, such as round and device."""
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")  # str hashes differ between processes
    state = np.random.SeedSequence([seed, word, *numbers]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, purpose, *numbers))
