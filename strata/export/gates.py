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
aten = torch.ops.aten
RELU, RELU6 = (aten.relu.default, aten.relu_.default), (aten.hardtanh.default, aten.hardtanh_.default)

Place = tuple[int, int]  # which ReLU, in the order of the forward pass, and which of its values


class Gates(TorchDispatchMode):
    """Records which values of a pass's ReLUs and ReLU6s let a gradient through (`found`, in the order of the backward
    pass) and which are nearest to where that changes. Has those do so that are `given`, or does it the other way at
    `flipped`."""

    def __init__(self, given: Sequence[Tensor] | None = None, flipped: Sequence[Place] = ()) -> None:
        super().__init__()
        self.given, self.flipped = given, flipped
        self.found: list[Tensor] = []
        self.nearest: list[tuple[float, Place]] = []
        self._relus = 0
        self._open: list[int] = []  # ReLUs whose backward has not come yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.threshold_backward.default:
            gradient, result, *_ = args
            return gradient * self._gate(result > 0)
        if func is aten.hardtanh_backward.default:
            gradient, value, lowest, highest = args
            return gradient * self._gate((value > lowest) & (value < highest))
        if args and isinstance(args[0], Tensor) and args[0].requires_grad and func in (*RELU, *RELU6):
            self._look(args[0], (0.0,) if func in RELU else tuple(args[1:3]) or (-1.0, 1.0))
        return func(*args, **(kwargs or {}))

    def _gate(self, own: Tensor) -> Tensor:
        gate = own if self.given is None else self.given[len(self.found)]
        number = self._open.pop()  # autograd takes the latest operation first
        for relu, at in self.flipped:
            if relu == number:
                gate.view(-1)[at] ^= True
        self.found.append(gate)
        return gate

    def _look(self, values: Tensor, corners: Sequence[float]) -> None:
        """Distances from where the gradient begins or ends, in units of what this ReLU usually sees."""
        away = torch.stack([(values - corner).abs() for corner in corners]).amin(0)
        distances = (away / values.square().mean().sqrt()).flatten()
        smallest, places = distances.topk(min(CANDIDATES, distances.numel()), largest=False)
        own = zip(smallest.tolist(), places.tolist(), strict=True)
        self.nearest += [(far, (self._relus, at)) for far, at in own]
        self.nearest = sorted(self.nearest)[:CANDIDATES]
        self._open.append(self._relus)
        self._relus += 1


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
