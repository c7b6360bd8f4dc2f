"""Several devices with the same Cut as one network: their channels lie side by side in every layer.

Only for simulation. Narrow networks spend nearly all their time in overhead; n of them as one spend it once.
The trained part has two forms, which differ in how maps lie in memory: `channels_last` (grouped convolutions of torch)
and `batch_last` (our own convolutions, for batches that fill registers). Features are [devices, batch, features] in
both.
The frozen part has the same weights on all devices and runs device by device, without autograd.
A network with an operation that has no rule in a form does not have that form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.training import kernels
from strata.training.vectorised import batch_last, channels_last
from strata.training.vectorised.channels_last import arranged
from strata.training.vectorised.joint_forward import JointForward, NotVectorisable

if TYPE_CHECKING:
    from strata.data.samples import Batch
    from strata.graph import ChannelGraph, Cut


__all__ = ["Grouped", "NotVectorisable"]


class Grouped(nn.Module):
    """`devices` copies of the cut's submodel. Parameter names are the full model's with dots replaced."""

    def __init__(
        self,
        graph: ChannelGraph,
        cut: Cut,
        devices: int,
        device: str = "cpu",
        own_kernels: bool = False,
        group: int | None = None,
    ) -> None:
        """`group`: samples that batch norms take together (simulated.py); None: all."""
        super().__init__()
        self.cut, self.devices, self.device = cut, devices, device
        self._usual = JointForward(graph, cut, devices, channels_last.FORM, group)
        self._quick: JointForward | None = None  # for full batches
        if own_kernels and device == "cpu" and group is None:  # batch_last has samples in one piece of memory
            kernels.require()
            with contextlib.suppress(NotVectorisable):
                self._quick = JointForward(graph, cut, devices, batch_last.FORM)
        self.own: dict[str, nn.Parameter] = {}
        for name in cut.trained:
            if name not in self._usual.used:
                raise NotVectorisable(f"{name} is not used")
            parameter = nn.Parameter(self._zeros(name))
            self.register_parameter(name.replace(".", "_"), parameter)
            self.own[name] = parameter
        if self._usual.used - set(cut.trained):
            raise NotVectorisable("weights that the user has frozen behind trained layers")
        self.to(device)
        self.frozen: list[dict[str, Tensor]] = []

    def load(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """What each device received: of cuts of the same structure, maybe of different channels."""
        with torch.no_grad():
            for name, parameter in self.own.items():
                parameter.copy_(torch.stack([one[name] for one in tensors]).view(parameter.shape))
        self.frozen = [
            {name: arranged(one[name].to(self.device)) for name in self._usual.frozen_names} for one in tensors
        ]

    def updates(self) -> list[dict[str, Tensor]]:
        """Per device, the trained parameters in the cut's shapes."""
        split = {
            name: parameter.detach().cpu().reshape(self.devices, *self.cut.shapes[name])
            for name, parameter in self.own.items()
        }
        return [{name: parts[d].clone() for name, parts in split.items()} for d in range(self.devices)]

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """One batch per device, all of one size; outputs [devices, batch, ...]."""
        fills_registers = len(batches[0][0]) % kernels.LANES == 0
        joint = self._quick if self._quick is not None and fills_registers else self._usual
        with torch.no_grad():
            pairs = zip(self.frozen, batches, strict=True)
            boundary = [joint.run_frozen(state, [arranged(x.to(self.device)) for x in batch]) for state, batch in pairs]
            joined = {node: joint.joined([one[node] for one in boundary]) for node in joint.boundary}
        return joint.run_trained(self.own, joined)

    def _zeros(self, name: str) -> Tensor:
        copies = torch.zeros(self.devices, *self.cut.shapes[name])
        return arranged(copies if name in self._usual.multiplied else copies.flatten(0, 1))
