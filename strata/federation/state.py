"""FederationState: everything a run must remember from one round to the next, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strata.federation.held_layers import Holdings


@dataclass(frozen=True)
class FederationState:
    """`round` rounds are done. Values, not places: a round makes a new state and leaves the old one as it was."""

    round: int
    tensors: dict[str, Tensor]  # the server's full model, state_dict order
    slots: dict[str, Tensor] = field(default_factory=dict)  # the server optimizer's tensors
    method: dict[str, Any] = field(default_factory=dict)  # what the method has learnt (early stopping), JSON
    holdings: Holdings = field(default_factory=Holdings)
    seen: tuple[float, ...] = ()  # sizes of the latest changes, where a bound follows them
    norms: dict[str, Any] = field(default_factory=dict)  # fixed statistics: when and for what measured, JSON
