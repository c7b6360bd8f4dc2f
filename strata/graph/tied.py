"""Weights that a model has under several names: one parameter, counted, sent and trained once, by its first name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def aliases(model: nn.Module) -> dict[str, str]:
    """Of each further name of a parameter, the first one."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            found[name] = known
    return found


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with every parameter once."""
    further = aliases(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in further}


def with_aliases(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What own_state leaves out is there again, as a copy: files of tensors hold none twice."""
    further = {name: state[first].clone() for name, first in aliases(model).items() if first in state}
    return {**state, **further}
