"""Learning rate over rounds."""

from __future__ import annotations

import math


def rate(round: int, rounds: int, start: float, end: float, warmup: int = 0) -> float:
    """Up to `start` in equal steps over the first `warmup` rounds, then along the cosine."""
    if round < warmup:
        return start * (round + 1) / (warmup + 1)
    return cosine(round - warmup, rounds - warmup, start, end)


def cosine(round: int, rounds: int, start: float = 0.1, end: float = 0.01) -> float:
    """From `start` in round 0 along half a cosine to `end` in the last round."""
    share = round / (rounds - 1) if rounds > 1 else 0.0
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
