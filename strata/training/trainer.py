"""One phase's working set: the submodel, the optimizer, and what a mini-batch does to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.execution.measured import standing_tensors
from strata.execution.optimizers import Optimizer, Releasing, new_releasing
from strata.training.settings import LocalTraining
from strata.training.submodels import BuiltSubmodel
from strata.training.waiting import Waiting, parts
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from strata.data.samples import Batch
    from strata.graph import ChannelGraph, Cut
    from strata.methods.base import Phase


class Trainer:
    """Takes the weights that the phase's submodel in the workspace holds now.

    With levels (FjORD) one optimizer, on the device's largest cut, lives through all mini-batches. Coordinates outside
    a mini-batch's level get gradient zero, so their momentum decays and still moves them, as it does where one network
    is sliced in its forward pass.
    """

    def __init__(
        self,
        workspace: Workspace,
        phase: Phase,
        settings: LocalTraining,
        lr: float,
        group: int | None = None,
        disk: Path | None = None,
    ) -> None:
        """`group`: samples that batch norms take together, where a batch in parts is simulated as a whole. `disk`: the
        device's folder for what frozen layers put out."""
        self.settings = settings
        self.names = phase.cut.trained
        where = (settings.device, settings.maps)
        self.outer = workspace.submodel(phase.cut, *where)
        self.outer.module.train()
        self.parameters = [self.outer.parameters[name] for name in self.names]
        self.rates = scaled(workspace.graph, self.names, phase.scaler)
        for parameter, rate in zip(self.parameters, self.rates, strict=True):
            if rate != 1:
                parameter.data.div_(rate)
        starts = ((p, (p.detach().clone(), rate)) for p, rate in zip(self.parameters, self.rates, strict=True))
        self.received = dict(starts) if settings.proximal else {}
        self.optimizer: Optimizer | Releasing
        if settings.release_gradients:
            self.optimizer = new_releasing(
                settings,
                self.parameters,
                lr,
                lambda own, rates: settings.new_optimizer(own, lr, rates),
                self.rates,
            )
        else:
            self.optimizer = settings.new_optimizer(self.parameters, lr, self.rates)
        self.distilled = phase.distilled
        self.levels = [
            None if level == phase.cut else (level.within(phase.cut), workspace.submodel(level, *where))
            for level in phase.levels
        ] or [None]
        for level in self.levels:
            if level is not None:
                level[1].module.train()
        inner = [(cut, level[1]) for cut, level in zip(phase.levels, self.levels, strict=False) if level is not None]
        self.forwards = {
            small.module: workspace.forward(cut, settings, group, disk)
            for cut, small in ((phase.cut, self.outer), *inner)
        }

    def step(self, x: Batch | Waiting, y: Tensor, level: int = -1) -> float:
        """One mini-batch (inputs, targets) at this level (default: the largest); returns its loss."""
        if isinstance(self.optimizer, Releasing):
            with self.optimizer.releasing(self._pull):
                return self._backward(self.outer, x, y)
        self.optimizer.zero_grad()
        within_small = self.levels[level]
        if within_small is None:
            loss = self._backward(self.outer, x, y)
        elif self.distilled:
            taught: list[Tensor] = []
            loss = self._backward(self.outer, x, y, taught)  # leaves its gradients: the level's are added
            self._backward_of_level(*within_small, x, torch.cat(taught).softmax(1))
        else:
            loss = self._backward_of_level(*within_small, x, y)
        for parameter in self.parameters:
            self._pull(parameter)
        if self.settings.clip is not None:
            self._clip(self.settings.clip)
        self.optimizer.step()
        return loss

    def _pull(self, parameter: nn.Parameter) -> None:
        """FedProx: the gradient of mu/2 |w - start|^2."""
        if parameter.grad is not None and parameter in self.received:
            start, rate = self.received[parameter]
            parameter.grad.add_(parameter.detach() - start, alpha=self.settings.proximal * rate**2)

    def values(self) -> list[Tensor]:
        """Of the parameters, as the server knows them."""
        both = zip(self.parameters, self.rates, strict=True)
        found = (p.detach().clone(memory_format=torch.contiguous_format).cpu() for p, _ in both)
        return [value if rate == 1 else value * rate for value, rate in zip(found, self.rates, strict=True)]

    def _clip(self, most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_ does, of the gradients by the parameters as the server knows them."""
        both = [(p.grad, rate) for p, rate in zip(self.parameters, self.rates, strict=True) if p.grad is not None]
        norm = torch.stack([gradient.norm() / rate for gradient, rate in both]).norm()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for gradient, _ in both:
            gradient.mul_(factor)

    def _backward_of_level(self, within: Cut, small: BuiltSubmodel, x: Batch | Waiting, y: Tensor) -> float:
        """One of the smaller levels; its gradients come on top of what the largest has."""
        small.load(within.extract(self.outer.state))
        loss = self._backward(small, x, y)
        found = {name: _gradient(small.parameters[name]) for name in self.names}
        if self.distilled:
            gradients = {name: _gradient(self.outer.parameters[name]) for name in self.names}
            for name, gradient in found.items():  # one by one: no second set of gradients
                within.scatter(gradients, {name: within.extract_one(name, gradients[name]).add_(gradient)})
        else:
            gradients = {name: torch.zeros_like(self.outer.parameters[name]) for name in self.names}
            within.scatter(gradients, found)
        for name, gradient in gradients.items():
            self.outer.parameters[name].grad = gradient
        return loss

    def _backward(
        self, small: BuiltSubmodel, x: Batch | Waiting, y: Tensor, taught: list[Tensor] | None = None
    ) -> float:
        """`taught`: where the outputs go, for others to learn from."""
        size = self.settings.micro_batch
        if size is None or size >= len(y):
            assert not isinstance(x, Waiting)
            return self._backward_of(small, x, y, 1.0, taught)
        inputs = parts(x, size)
        loss = 0.0
        for targets in y.split(size):
            part = small.arranged(next(inputs))  # at once: as it came it need not stay...
            loss += self._backward_of(small, part, targets, len(targets) / len(y), taught)
            del part  # ...nor beside the next
        return loss

    def _backward_of(
        self, small: BuiltSubmodel, x: Batch, y: Tensor, share: float, taught: list[Tensor] | None
    ) -> float:
        outputs = self.forwards[small.module](*small.arranged(x))
        if taught is not None:
            taught.append(outputs.detach())
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
        return [
            *standing_tensors(self.outer.module, self.optimizer, *batch),
            *(start for start, _ in self.received.values()),
            *inner,
        ]


def scaled(graph: ChannelGraph, names: Sequence[str], scaler: float | None) -> list[float]:
    """What each parameter is divided by in training, 1 for most.

    A layer whose outputs are divided by r is one whose weights and biases are: w' = w / r. Its gradient is r times that
    by w, so that SGD on w is SGD on w' at a learning rate of 1 / r^2 and a weight decay of r^2: no further tensor.
    """
    if scaler is None:
        return [1.0] * len(names)
    weights = {name for name in graph.output_dims if graph.layer_of.get(name, 0) <= graph.depth}
    biases = {name.removesuffix("weight") + "bias" for name in weights if name.endswith("weight")}
    return [scaler if name in weights | biases else 1.0 for name in names]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
