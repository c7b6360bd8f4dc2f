"""The numbers that torch draws: a permutation from a seed, as torch.randperm makes it."""

from __future__ import annotations

import hashlib
import random


def derive(seed: int, purpose: str) -> int:
    """As strata/core/seeds.py: a 63-bit seed for one purpose."""
    return int.from_bytes(hashlib.sha256(repr((int(seed), purpose)).encode()).digest()[:8], "big") >> 1


def randperm(count: int, seed: int) -> list[int]:
    """torch.randperm(count, generator=torch.Generator().manual_seed(seed)), for counts below 2^32 / 20."""
    draws = _twister(seed)
    order = list(range(count))
    for place in range(count - 1):
        other = place + draws.getrandbits(32) % (count - place)
        order[place], order[other] = order[other], order[place]
    return order


def _twister(seed: int) -> random.Random:
    """The Mersenne Twister, begun as torch begins it: Python's own way of seeding is another."""
    state = [seed & 0xFFFFFFFF]
    for place in range(1, 624):
        last = state[-1]
        state.append((1812433253 * (last ^ last >> 30) + place) & 0xFFFFFFFF)
    made = random.Random()
    made.setstate((3, (*state, 624), None))
    return made
