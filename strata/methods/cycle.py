"""Cycle: one block of layers a round, from the lowest to the uppermost and round again; the others are frozen.

Wang et al., "Why Go Full? Elevating Federated Learning Through Partial Network Updates" (FedPart), NeurIPS 2024, but
without its rounds of the whole network, which a small device cannot hold, and with the classifier in every round.
Without a budget a block is one layer, as there; with one it is as wide as fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.methods.card import Card
from strata.methods.windows import Windows


@dataclass(frozen=True)
class Cycle(Windows):
    needs_budget = False
    card = Card(
        "cycle",
        label="cycle",
        colour="#0f8fa3",
        trains="one block of layers in turn, as wide as fits, round and round; the others stay as they are",
        evaluates="the whole model",
        levels="the weakest says where blocks begin, those of stronger devices reach higher",
        paper="Wang et al., Why Go Full? Elevating FL Through Partial Network Updates (FedPart), NeurIPS 2024",
        for_pretrained=True,
    )

    def step(self, round: int) -> int:
        return round % len(self.windows)
