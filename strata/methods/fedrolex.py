"""FedRolex: all devices train the same window of channels, which rolls on by one channel a round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022:
I_k^(r) = {r^, ..., r^ + floor(s M_k) - 1} mod M_k with r^ = r mod M_k. Every channel is trained equally often.
The full model is evaluated. Devices of different levels use their own s_e.

The variant `original` trains as its authors do, which is as HeteroFL's do (heterofl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.methods.aggregate import ClassRows
from strata.methods.base import Levels, Phase, original_variant
from strata.methods.card import Card

if TYPE_CHECKING:
    from torch import Tensor

    from strata.graph import Cut
    from strata.methods.aggregate import Aggregate
    from strata.methods.budget import Budget


@dataclass(frozen=True)
class FedRolex(Levels):
    card = Card(
        "fedrolex",
        label="FedRolex",
        colour="#8a63c7",
        trains="a window of channels that rolls on each round",
        evaluates="the whole model",
        levels="each device its own width",
        paper="Alam et al., FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction, NeurIPS 2022",
        options={"variant": original_variant("masked classes, clipped gradients, scaler")},
    )
    variant: str | None = field(default=None, metadata={"since": 2})

    @classmethod
    def gradients_wait(cls, budget: Budget) -> bool:
        """Clipping goes by all of them."""
        return budget.options.get("variant") is not None

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.rolling(self.scale(device), round)

    def phases_for(self, round: int, device: int) -> tuple[Phase, ...]:
        cut = self.cut_for(round, device)
        if self.variant is None:
            return (Phase(cut),)
        return (Phase(cut, masked=True, clip=1.0, scaler=self.scale(device)),)

    @property
    def aggregates(self) -> bool:
        return self.variant is not None

    def aggregation(self, round: int, tensors: Mapping[str, Tensor]) -> Aggregate | None:
        return ClassRows(tensors, self.graph.classifier) if self.aggregates else None
