"""What takes a device's step: SGD, SGD that keeps its momentum in bfloat16, Adam and AdamW, and gradients that go as
soon as made.

None of them is a torch.optim.Optimizer: making one, and its first step, load torch's compiler, some 2 s and 70 MiB in
every process that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strata.execution.execution import Execution


class Optimizer(Protocol):
    """What training needs of one; those of torch.optim have it."""

    @property
    def state(self) -> Any: ...
    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


class SGD:
    """torch.optim.SGD(fused=True), to the bit: v = momentum * v + gradient + weight_decay * w, then w = w - lr * v.

    `rates`: a parameter of rate r is learned at lr / r^2 and decays by weight_decay * r^2 (see training/trainer.py).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        rates: Sequence[float] = (),
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        # one call of torch's takes parameters of one rate and dtype
        self._groups: dict[tuple[float, torch.dtype], list[nn.Parameter]] = {}
        for parameter, rate in zip(parameters, rates or [1.0] * len(parameters), strict=True):
            self._groups.setdefault((rate, parameter.dtype), []).append(parameter)

    def zero_grad(self) -> None:
        for parameters in self._groups.values():
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for (rate, _), group in self._groups.items():
            moving = [parameter for parameter in group if parameter.grad is not None]
            new = [parameter for parameter in moving if parameter not in self.state]
            for parameters, is_first in ((new, True), ([one for one in moving if one in self.state], False)):
                if parameters:
                    self._step(parameters, self.lr / rate**2, self.weight_decay * rate**2, is_first)

    def _step(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, is_first: bool) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.momentum and is_first:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self.state[parameter] = {"momentum_buffer": torch.empty_like(gradient)}
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters] if self.momentum else []
        taken = [parameters, gradients, momenta] if momenta else [parameters, gradients]
        seen = [list(one) for one in zip(*map(_as_they_lie, zip(*taken, strict=True)), strict=True)]
        torch._fused_sgd_(
            seen[0],
            seen[1],
            seen[2] if momenta else [],
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=is_first,
        )


def _as_they_lie(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A parameter and what goes with it, which are of one shape: torch's step copies what is not contiguous, and seen
    from the side channels last is."""
    lie_last = tensors[0].dim() == 4 and all(one.is_contiguous(memory_format=torch.channels_last) for one in tensors)
    return tuple(one.permute(0, 2, 3, 1) for one in tensors) if lie_last else tensors


class LeanSGD(SGD):
    """SGD whose momentum is kept in bfloat16.

    v and w are computed in the parameter's own precision; v is rounded, to nearest and ties to even, only where it is
    put away. The gradient is used up.
    """

    def _step(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, is_first: bool) -> None:
        for parameter in parameters:
            velocity = parameter.grad
            assert velocity is not None
            if weight_decay:
                velocity.add_(parameter, alpha=weight_decay)
            if is_first:
                self.state[parameter] = {"momentum_buffer": velocity.to(torch.bfloat16)}
            else:
                kept = self.state[parameter]["momentum_buffer"]
                velocity.add_(kept.to(velocity.dtype), alpha=self.momentum)
                kept.copy_(velocity)
            parameter.add_(velocity, alpha=-lr)


class Adam:
    """torch.optim.Adam(fused=True), or AdamW (`decoupled`), to the bit.

    `rates`: a parameter w' = w / r, whose gradient is r times that by w, is learned at lr / r, with r eps, and decays
    by r^2 the weight decay, decoupled by r."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        rates: Sequence[float] = (),
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay, self.decoupled = lr, betas, eps, weight_decay, decoupled
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._parameters = list(zip(parameters, rates or [1.0] * len(parameters), strict=True))
        self._steps: dict[nn.Parameter, int] = {}

    def zero_grad(self) -> None:
        for parameter, _ in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        groups: dict[tuple[float, torch.dtype, int], list[nn.Parameter]] = {}  # what one call of torch's takes
        for parameter, rate in self._parameters:
            if parameter.grad is not None:
                self._steps[parameter] = self._steps.get(parameter, 0) + 1
                groups.setdefault((rate, parameter.dtype, self._steps[parameter]), []).append(parameter)
        for (rate, _, number), group in groups.items():
            self._step(group, rate, number)

    def _step(self, parameters: list[nn.Parameter], rate: float, number: int) -> None:
        taken = []
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            assert parameter.grad is not None
            kept = self.state[parameter]
            taken.append(_as_they_lie((parameter, parameter.grad, kept["exp_avg"], kept["exp_avg_sq"])))
        weights, gradients, means, squares = (list(one) for one in zip(*taken, strict=True))
        step = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        step(
            weights,
            gradients,
            means,
            squares,
            [],
            [torch.tensor(float(number))] * len(parameters),
            lr=self.lr / rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay * (rate if self.decoupled else rate**2),
            eps=self.eps * rate,
            amsgrad=False,
            maximize=False,
        )


def new_optimizer(
    execution: Execution, parameters: Sequence[nn.Parameter], lr: float, rates: Sequence[float] = ()
) -> SGD | Adam:
    """Fresh: a device keeps nothing between rounds."""
    if execution.is_adam:
        betas, decoupled = (execution.momentum, execution.beta), execution.update_rule == "adamw"
        return Adam(parameters, lr, betas, execution.eps, execution.weight_decay, decoupled, rates)
    kind = SGD if execution.momentum_dtype == "float32" else LeanSGD
    return kind(parameters, lr, execution.momentum, execution.weight_decay, rates)


Change = Callable[[nn.Parameter], None]  # of a gradient, before the step is taken


class Releasing:
    """Within `releasing`, which is one batch, backward hands over each parameter's gradient as soon as it is whole,
    over all the places that use it, and the gradient goes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @contextmanager
    def releasing(self, change: Change | None = None) -> Iterator[None]:
        """`change` is made to the gradient of a batch once."""

        def hand_over(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            with torch.no_grad():
                self.take(parameter, change)
            parameter.grad = None

        # only for one batch: the module lives on, with another optimizer
        hooks = [parameter.register_post_accumulate_grad_hook(hand_over) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.finish()

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """As one optimizer of all parameters would have it."""
        raise NotImplementedError

    def take(self, parameter: nn.Parameter, change: Change | None) -> None:
        """Its gradient."""
        raise NotImplementedError

    def finish(self) -> None:
        """The batch has ended."""


class Released(Releasing):
    """An optimizer for each parameter, which takes its step at once."""

    def __init__(self, optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
        super().__init__(list(optimizers))
        self.optimizers = optimizers

    def take(self, parameter: nn.Parameter, change: Change | None) -> None:
        if change is not None:
            change(parameter)
        self.optimizers[parameter].step()

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        return {parameter: kept for one in self.optimizers.values() for parameter, kept in one.state.items()}


class Summed(Releasing):
    """SGD with momentum of a batch in parts, without gradients that wait: those of the parts are summed in the
    momentum, v = momentum * v + weight_decay * w + g1 + g2 + ..., and at the end w = w - lr * v. The same step up to
    rounding."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        rates: Sequence[float],
    ) -> None:
        super().__init__(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._rates = dict(zip(parameters, rates, strict=True))
        self._moving: dict[nn.Parameter, Tensor] = {}  # what has a gradient in this batch, and its momentum
        self._state: dict[Any, dict[str, Any]] = {}

    def take(self, parameter: nn.Parameter, change: Change | None) -> None:
        if parameter not in self._moving:  # the batch's first part
            if change is not None:
                change(parameter)
            if parameter not in self._state:
                self._state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
            velocity = self._moving[parameter] = self._state[parameter]["momentum_buffer"]
            velocity.mul_(self.momentum).add_(parameter, alpha=self.weight_decay * self._rates[parameter] ** 2)
        assert parameter.grad is not None
        self._moving[parameter].add_(parameter.grad)

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, velocity in self._moving.items():
            parameter.add_(velocity, alpha=-self.lr / self._rates[parameter] ** 2)
        self._moving.clear()

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        return self._state


def new_releasing(
    execution: Execution,
    parameters: Sequence[nn.Parameter],
    lr: float,
    make: Callable[[list[nn.Parameter], list[float]], Optimizer],
    rates: Sequence[float] = (),
) -> Releasing:
    """For an execution that releases gradients. `make`: an optimizer of these parameters at these rates."""
    rates = rates or [1.0] * len(parameters)
    if execution.in_parts:
        return Summed(parameters, lr, execution.momentum, execution.weight_decay, rates)
    return Released({one: make([one], [rate]) for one, rate in zip(parameters, rates, strict=True)})
