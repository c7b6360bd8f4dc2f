"""What the server makes of a round's mean (methods/aggregate.py), and outcomes in the order of their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.engines import Outcome
from strata.methods.aggregate import Aggregate, RunningMean

__all__ = ["Aggregate", "RunningMean", "ServerOptimizer", "in_order"]


def in_order(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """The outcomes by index; only those ahead of their turn are held back."""
    early: dict[int, Outcome] = {}
    turn = 0
    for outcome in outcomes:
        early[outcome.index] = outcome
        while turn in early:
            yield early.pop(turn)
            turn += 1
    assert not early, "the engine left jobs unanswered"


@dataclass(frozen=True)
class ServerOptimizer:
    """What the server does with the mean. `none` takes it as the new value (FedAvg).

    momentum: FedAvgM, v = beta1 v + d, x += lr v (Hsu et al., 2019). adam: FedAdam, m = beta1 m + (1 - beta1) d,
    v = beta2 v + (1 - beta2) d^2, x += lr m / (sqrt(v) + tau) (Reddi et al., ICLR 2021). d = mean - x, per trained
    coordinate; the others keep their value and their slots.
    """

    kind: str = "none"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in ("none", "momentum", "adam"):
            raise BadInput(f"the server optimizer is none, momentum or adam, not {self.kind!r}")
        if not (0 < self.lr < float("inf") and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.tau > 0):
            raise BadInput("the server optimizer needs lr > 0, 0 <= beta1 < 1, 0 <= beta2 < 1 and tau > 0")

    @torch.no_grad()
    def apply(
        self, state: Mapping[str, Tensor], slots: Mapping[str, Tensor], mean: Aggregate
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """New tensors and slots; what is given stays as it is."""
        new_state, new_slots = dict(state), dict(slots)
        for name, value, touched in mean.means():
            old = state[name]
            if self.kind == "none" and self.lr == 1.0:
                new_state[name] = torch.where(touched, value, old)
                continue
            step = delta = value - old
            if self.kind != "none":
                first = slots.get(f"first/{name}", torch.zeros_like(old))
                scale = 1.0 if self.kind == "momentum" else 1 - self.beta1
                step = new_slots[f"first/{name}"] = torch.where(touched, self.beta1 * first + scale * delta, first)
            if self.kind == "adam":
                second = slots.get(f"second/{name}", torch.zeros_like(old))
                grown = self.beta2 * second + (1 - self.beta2) * delta * delta
                second = new_slots[f"second/{name}"] = torch.where(touched, grown, second)
                step = step / (second.sqrt() + self.tau)
            new_state[name] = torch.where(touched, old + self.lr * step, old)
        return new_state, new_slots
