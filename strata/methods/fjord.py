"""FjORD: HeteroFL's nested prefixes, but a device switches, mini-batch by mini-batch, among all levels it can hold.

Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021. The level of a mini-batch is drawn uniformly from {s_e' : s_e' <= s_e}; momentum lives on.

The variant `original` has their knowledge distillation, which the SLT paper's comparison has not: the device's largest
level learns from the labels in every mini-batch, and the level that is drawn learns from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.execution import state_bytes
from strata.methods.base import Phase, original_variant
from strata.methods.card import Card
from strata.methods.heterofl import HeteroFL

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut
    from strata.methods.budget import Budget


@dataclass(frozen=True)
class FjORD(HeteroFL):
    card = Card(
        "fjord",
        label="FjORD",
        colour="#a8861f",
        trains="the first channels, at a level drawn per mini-batch among those the device can hold",
        evaluates="the largest device's model",
        levels="each device all levels up to its own",
        paper="Horvath et al., FjORD: Fair and Accurate FL under heterogeneous targets with Ordered Dropout, "
        "NeurIPS 2021",
        options={"variant": original_variant("the largest level teaches the smaller ones")},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for (low, small), (high, large) in pairwise(self.prefixes.items()):
            try:
                small.within(large)
            except BadInput as error:  # floors within a concatenation need not grow with the scale
                raise BadInput(
                    f"fjord needs nested levels, and in this network {low:g} is not part of {high:g}"
                ) from error

    @classmethod
    def gradients_wait(cls, budget: Budget) -> bool:
        """A device's nested levels share them."""
        return len(budget.sizes or budget.constraints) > 1

    @classmethod
    def kept_beside(cls, graph: ChannelGraph, smaller: Cut) -> int:
        """The submodel of every smaller level stays built, with its weights."""
        return state_bytes(graph, smaller)

    def phases_for(self, round: int, device: int) -> tuple[Phase, ...]:
        held = tuple(cut for scale, cut in self.prefixes.items() if scale <= self.scale(device))
        levels = held if len(held) > 1 else ()
        return (Phase(held[-1], levels=levels, distilled=self.variant is not None and bool(levels)),)

    @property
    def aggregates(self) -> bool:
        return False
