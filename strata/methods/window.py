"""Window: a window of layers that moves up over the rounds; what it has passed is frozen, what is above waits frozen.

Layer by layer as in SLT (Pfeiffer et al., NeurIPS 2023), but at full width throughout, so that what is pretrained
stays; ChainFed does so with adapters (Wu et al., "Beyond End-to-End: Dynamic Chain Optimization for Private LLM
Adaptation on the Edge", 2026). Each window is as wide as fits, and has rounds in proportion to its layers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from strata.methods.card import Card
from strata.methods.windows import Windows

if TYPE_CHECKING:
    from strata.methods.budget import Budget


@dataclass(frozen=True)
class Window(Windows):
    card = Card(
        "window",
        label="window",
        colour="#b4372f",
        trains="a window of layers, as wide as fits, that moves up over the rounds; the others stay as they are",
        evaluates="the whole model",
        levels="the weakest says where windows begin, those of stronger devices reach higher",
        paper="Wu et al., Beyond End-to-End: Dynamic Chain Optimization (ChainFed), 2026; without its adapters",
        for_pretrained=True,
    )
    rounds: int = 500

    @classmethod
    def timing(cls, budget: Budget) -> dict[str, int]:
        return {"rounds": budget.rounds}

    def step(self, round: int) -> int:
        """Every window has a round at least, where there are enough."""
        ends = list(accumulate(max(1, high - low) for low, high in self.windows))
        ends = [max(number, end * self.rounds // ends[-1]) for number, end in enumerate(ends, start=1)]
        return min(bisect_right(ends, round), len(ends) - 1)
