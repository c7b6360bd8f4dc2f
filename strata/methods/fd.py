"""Federated Dropout: each device trains random channels, drawn anew in every round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018:
I_k^(r,c) is a random choice of floor(s M_k) of the M_k channels. The full model is evaluated. Devices of different
levels use their own s_e.

Variants for the co-adaptation study (Pfeiffer et al., NeurIPS 2023, appendix): `shared`, one set per round for all
devices; `pool`, the set of the round comes from a fixed pool of `pool` sets (1/pool each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strata.core.errors import BadInput
from strata.core.seeds import generator
from strata.core.settings import Setting
from strata.methods.base import Levels
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import Cut

VARIANTS = ("device", "shared", "pool")


@dataclass(frozen=True)
class FD(Levels):
    card = Card(
        "fd",
        label="FD",
        colour="#1d9a85",
        trains="random channels, drawn per device and round",
        evaluates="the whole model",
        levels="each device its own width",
        paper="Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, 2018",
        options={
            "seed": Setting("the channels follow from it"),
            "variant": Setting("device (default), shared or pool", metavar="NAME", choices=VARIANTS),
            "pool": Setting("variant pool: number of sets", metavar="N", least=1, whole=True),
        },
    )
    seed: int = 0
    variant: str = "device"
    pool: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.variant == "pool") != (self.pool is not None) or (self.pool is not None and self.pool < 1):
            raise BadInput(f"variant pool of fd needs a pool of 1 or more sets, other variants none, not {self.pool}")

    def _set(self, round: int, device: int) -> torch.Generator:
        """The generator of this set; equal generators draw equal sets."""
        if self.variant == "shared":
            return generator(self.seed, "fd shared set", round)
        if self.variant == "pool":
            assert self.pool is not None
            draw = generator(self.seed, "fd pool draw", round)
            return generator(self.seed, "fd pool set", int(torch.randint(self.pool, (), generator=draw)))
        return generator(self.seed, "fd device set", round, device)

    @property
    def period(self) -> int | None:
        return None if self.variant == "device" else super().period

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.random(self.scale(device), self._set(round, device))
