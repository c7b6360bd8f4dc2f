"""HeteroFL: each device trains the first channels of every layer, as many as its own level allows.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021: I_k^(e) = {i : 0 <= i < floor(s_e M_k)}, the same in every round.

Channels beyond the largest device's would never be trained, so the server's model is the largest device's.

The variant `original` has what its authors train with and the SLT paper's comparison has not: classes that a device
does not hold are masked in its cross-entropy, and the classifier's rows averaged over those that hold the class;
gradients are clipped to norm 1; layers' outputs are divided by the device's share of the width in training (scaler).
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
class HeteroFL(Levels):
    card = Card(
        "heterofl",
        label="HeteroFL",
        colour="#cf4d76",
        trains="the first channels, as many as the device's level allows",
        evaluates="the largest device's model",
        levels="each device its own width",
        paper="Diao et al., HeteroFL: Computation and Communication Efficient FL for Heterogeneous Clients, ICLR 2021",
        options={"variant": original_variant("masked classes, clipped gradients, scaler")},
    )
    variant: str | None = field(default=None, metadata={"since": 2})

    @classmethod
    def gradients_wait(cls, budget: Budget) -> bool:
        """Clipping goes by all of them."""
        return budget.options.get("variant") is not None

    def server_cut(self) -> Cut:
        return self.prefixes[max(self.constraints)]

    def cut_for(self, round: int, device: int) -> Cut:
        return self.prefixes[self.scale(device)]

    def phases_for(self, round: int, device: int) -> tuple[Phase, ...]:
        cut = self.cut_for(round, device)
        if self.variant is None:
            return (Phase(cut),)
        return (Phase(cut, masked=True, clip=1.0, scaler=self.scale(device) / max(self.constraints)),)

    @property
    def aggregates(self) -> bool:
        return self.variant is not None

    def aggregation(self, round: int, tensors: Mapping[str, Tensor]) -> Aggregate | None:
        return ClassRows(tensors, self.graph.classifier) if self.aggregates else None
