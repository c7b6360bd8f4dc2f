"""Which ReLUs a gradient in float32 took the other way than double precision, and what is left with the same ones.

A ReLU whose value lies within rounding of zero lets a gradient through or not, and one of a million moves the whole
gradient by half a percent (tests/training/test_rounding.py). Double precision knows the values that are nearest to zero
and what each of them would change. The changes that fit a float32 gradient best, each whole or not at all, are made,
and double precision computes once more: what then differs is rounding, or a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CANDIDATES = 24  # values nearest to zero, of all in a pass: float32 flips one to five of a network's million
FORWARD = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
BACKWARD = torch.ops.aten.threshold_backward.default

Place = tuple[int, int]  # which ReLU, in the order of the forward pass, and which of its values


class Gates(TorchDispatchMode):
    """Records which values of a pass's ReLUs let a gradient through (`found`, in the order of the backward pass) and
    which are nearest to zero. Has those do so that are `given`, or does it the other way at `flipped`."""

    def __init__(self, given: Sequence[Tensor] | None = None, flipped: Sequence[Place] = ()) -> None:
        super().__init__()
        self.given, self.flipped = given, flipped
        self.found: list[Tensor] = []
        self.nearest: list[tuple[float, Place]] = []
        self._relus = 0
        self._numbers: dict[int, int] = {}  # where its result lies in memory -> which ReLU

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BACKWARD:
            return args[0] * self._gate(args[1])
        trained = func in FORWARD and args[0].requires_grad
        if trained:
            self._look(args[0])
        made = func(*args, **(kwargs or {}))
        if trained:
            self._numbers[made.data_ptr()] = self._relus
            self._relus += 1
        return made

    def _gate(self, result: Tensor) -> Tensor:
        gate = result > 0 if self.given is None else self.given[len(self.found)]
        number = self._numbers.get(result.data_ptr())
        for relu, at in self.flipped:
            if relu == number:
                gate.view(-1)[at] ^= True
        self.found.append(gate)
        return gate

    def _look(self, values: Tensor) -> None:
        """Distances from zero are in units of what this ReLU usually sees."""
        distances = (values / values.square().mean().sqrt()).abs().flatten()
        smallest, places = distances.topk(min(CANDIDATES, distances.numel()), largest=False)
        own = zip(smallest.tolist(), places.tolist(), strict=True)
        self.nearest += [(far, (self._relus, at)) for far, at in own]
        self.nearest = sorted(self.nearest)[:CANDIDATES]


def with_its_relus(found: np.ndarray, gradient: Callable[[Gates], np.ndarray]) -> tuple[np.ndarray, int]:
    """Double precision's gradient with the ReLUs that `found` was most likely made with, and how many that flips.

    `gradient` computes it while the gates that it is given are active, with values in contiguous order of memory.
    """
    plain = Gates()
    wanted = gradient(plain)
    places = [place for _, place in plain.nearest]
    if not places:
        return wanted, 0
    changes = np.stack([gradient(Gates(flipped=[place])) - wanted for place in places], axis=1)
    shares = np.linalg.lstsq(changes, found - wanted, rcond=None)[0]
    flipped = [place for place, share in zip(places, shares, strict=True) if share > 0.5]
    return gradient(Gates(flipped=flipped)), len(flipped)
