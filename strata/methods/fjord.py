"""FjORD: HeteroFL's nested prefixes, but a device switches, mini-batch by mini-batch, among all levels it can hold.

Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021. The level of a mini-batch is drawn uniformly from {s_e' : s_e' <= s_e}; momentum lives on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from strata.core.errors import BadInput
from strata.methods.base import Task
from strata.methods.heterofl import HeteroFL


@dataclass(frozen=True)
class FjORD(HeteroFL):
    name = "fjord"

    def __post_init__(self) -> None:
        super().__post_init__()
        for (low, small), (high, large) in pairwise(self.prefixes.items()):
            try:
                small.within(large)
            except BadInput as error:  # floors within a concatenation need not grow with the scale
                raise BadInput(
                    f"fjord needs nested levels, and in this network {low:g} is not part of {high:g}"
                ) from error

    def assign(self, round: int, devices: Sequence[int]) -> list[Task]:
        return [self._task(round, device) for device in devices]

    def _task(self, round: int, device: int) -> Task:
        held = tuple(cut for scale, cut in self.prefixes.items() if scale <= self.scale(device))
        return Task(round, device, held[-1], levels=held if len(held) > 1 else ())
