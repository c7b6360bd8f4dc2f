"""One phase's working set: the submodel, the optimizer, and what a mini-batch does to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution.measured import standing_tensors
from strata.execution.optimizers import Released
from strata.training.settings import LocalTraining
from strata.training.submodels import BuiltSubmodel
from strata.training.waiting import Waiting
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.data.samples import Batch
    from strata.methods.base import Phase


class Trainer:
    """Takes the weights that the phase's submodel in the workspace holds now.

    With levels (FjORD) one optimizer, on the device's largest cut, lives through all mini-batches. Coordinates outside
    a mini-batch's level get gradient zero, so their momentum decays and still moves them, as it does where one network
    is sliced in its forward pass.
    """

    def __init__(self, workspace: Workspace, phase: Phase, settings: LocalTraining, lr: float) -> None:
        self.settings = settings
        self.names = phase.cut.trained
        where = (settings.device, settings.maps)
        self.outer = workspace.submodel(phase.cut, *where)
        self.outer.module.train()
        self.parameters = [self.outer.parameters[name] for name in self.names]
        self.received = {p: p.detach().clone() for p in self.parameters} if settings.proximal else {}
        self.optimizer: torch.optim.Optimizer | Released
        if settings.release_gradients:
            if phase.levels:
                raise BadInput(
                    "gradients cannot be released as they are made where mini-batches train levels of one network: "
                    "leave out release_gradients"
                )
            self.optimizer = Released(self.parameters, lambda own: settings.new_optimizer(own, lr))
        else:
            self.optimizer = settings.new_optimizer(self.parameters, lr)
        self.levels = [
            None if level == phase.cut else (level.within(phase.cut), workspace.submodel(level, *where))
            for level in phase.levels
        ] or [None]
        for level in self.levels:
            if level is not None:
                level[1].module.train()
        inner = [(cut, level[1]) for cut, level in zip(phase.levels, self.levels, strict=False) if level is not None]
        self.forwards = {
            small.module: workspace.forward(cut, settings) for cut, small in ((phase.cut, self.outer), *inner)
        }

    def step(self, x: Batch | Waiting, y: Tensor, level: int = -1) -> float:
        """One mini-batch (inputs, targets) at this level (default: the largest); returns its loss."""
        if isinstance(self.optimizer, Released):
            with self.optimizer.releasing(self._pull):
                return self._backward(self.outer, x, y)
        self.optimizer.zero_grad()
        within_small = self.levels[level]
        if within_small is None:
            loss = self._backward(self.outer, x, y)
        else:
            within, small = within_small
            small.load(within.extract(self.outer.state))
            loss = self._backward(small, x, y)
            gradients = {name: torch.zeros_like(self.outer.parameters[name]) for name in self.names}
            within.scatter(gradients, {name: _gradient(small.parameters[name]) for name in self.names})
            for name, gradient in gradients.items():
                self.outer.parameters[name].grad = gradient
        for parameter in self.parameters:
            self._pull(parameter)
        self.optimizer.step()
        return loss

    def _pull(self, parameter: nn.Parameter) -> None:
        """FedProx: the gradient of mu/2 |w - start|^2."""
        if self.settings.proximal and parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - self.received[parameter], alpha=self.settings.proximal)

    def _backward(self, small: BuiltSubmodel, x: Batch | Waiting, y: Tensor) -> float:
        size = self.settings.micro_batch
        if size is None or size >= len(y):
            assert not isinstance(x, Waiting)
            return self._backward_of(small, x, y, 1.0)
        inputs = x.split(size) if isinstance(x, Waiting) else zip(*(one.split(size) for one in x), strict=True)
        # each is arranged at once: as it came it need not stay
        parts = zip(map(small.arranged, inputs), y.split(size), strict=True)
        return sum(self._backward_of(small, part, targets, len(targets) / len(y)) for part, targets in parts)

    def _backward_of(self, small: BuiltSubmodel, x: Batch, y: Tensor, share: float) -> float:
        outputs = self.forwards[small.module](*small.arranged(x))
        loss = self.settings.mean_loss(outputs, y.to(small.device))
        del outputs  # autograd keeps what backward needs of them
        loss = loss if share == 1 else loss * share
        loss.backward()
        return loss.item()

    def release(self) -> None:
        """Submodels stay built, their gradients need not."""
        for level in (self.outer, *(level[1] for level in self.levels if level is not None)):
            level.module.zero_grad()

    def standing(self, x: Batch | Waiting, y: Tensor) -> list[Tensor]:
        """What lives through a step, for measuring it."""
        batch = (*(x.tensors if isinstance(x, Waiting) else x), y)
        inner = [tensor for level in self.levels if level is not None for tensor in level[1].state.values()]
        return [*standing_tensors(self.outer.module, self.optimizer, *batch), *self.received.values(), *inner]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
