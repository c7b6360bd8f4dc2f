"""Optimizers that keep less: momentum in bfloat16, and gradients that go as soon as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class LeanSGD(Optimizer):
    """SGD with momentum and weight decay whose momentum is kept in bfloat16.

    v = momentum * v + gradient + weight_decay * w and w = w - lr * v are computed in the parameter's own precision; v
    is rounded, to nearest and ties to even, only where it is put away. The gradient is used up.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return None if closure is None else closure()

    def _step(self, parameter: nn.Parameter, velocity: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            velocity.add_(parameter, alpha=group["weight_decay"])
        kept = self.state[parameter]
        if "momentum_buffer" in kept:
            velocity.add_(kept["momentum_buffer"].to(velocity.dtype), alpha=group["momentum"])
            kept["momentum_buffer"].copy_(velocity)
        else:
            kept["momentum_buffer"] = velocity.to(torch.bfloat16)
        parameter.add_(velocity, alpha=-group["lr"])


Change = Callable[[nn.Parameter], None]  # of a gradient, before the step is taken


class Released:
    """An optimizer for each parameter. Within `releasing`, backward takes a parameter's step as soon as its gradient is
    whole, over all the places that use it, and the gradient goes."""

    def __init__(self, parameters: Sequence[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.optimizers = {parameter: make([parameter]) for parameter in parameters}

    @contextmanager
    def releasing(self, change: Change | None = None) -> Iterator[None]:
        def step(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if change is not None:
                change(parameter)
            self.optimizers[parameter].step()
            parameter.grad = None

        # only for one backward pass: the module lives on, with another optimizer
        hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in self.optimizers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Of all of them, as one optimizer would have it."""
        return {parameter: kept for one in self.optimizers.values() for parameter, kept in one.state.items()}
