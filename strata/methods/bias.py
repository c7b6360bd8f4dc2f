"""Bias: biases, norms and the classifier are trained; all other weights stay as they are.

Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models", ACL
2022. Little is sent, but activations are those of the whole model: it saves far less memory than traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from strata.methods.base import OneCut
from strata.methods.card import Card

if TYPE_CHECKING:
    from strata.graph import Cut


@dataclass(frozen=True)
class Bias(OneCut):
    card = Card(
        "bias",
        label="biases",
        colour="#9c5a8e",
        trains="biases, norms and the classifier; all other weights stay as they are",
        evaluates="the whole model",
        levels="the same on all devices, which must all be able to hold it",
        paper="Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning, ACL 2022",
        for_pretrained=True,
    )

    @property
    def setting(self) -> str:
        return "biases and norms"

    @cached_property
    def cut(self) -> Cut:
        shapes = self.graph.state_shapes  # of one dim: biases, and the scales and shifts of norms
        return self.graph.only(name for name in self.graph.parameter_names if len(shapes[name]) == 1)
