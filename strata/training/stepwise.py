"""Running a cut graph operation by operation, where something has to happen between operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from strata.graph.rewrite import CutCall


class StepValues:
    """The operands of one step: values made before, cut where the step says so; parameters from `state`."""

    def __init__(self, step: CutCall, values: Mapping[Any, Any], state: Mapping[str, Tensor]) -> None:
        self._values, self._state = values, state
        self._cut: dict[Any, Any] = {}
        for cut in step.cuts:
            self._cut[cut.input] = take(
                self._cut[cut.input] if cut.input in self._cut else values[cut.input], cut.dim, cut.positions
            )

    def __call__(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op == "get_attr":
            return self._state[str(argument.target)]
        return self._cut[argument] if argument in self._cut else self._values[argument]


def run_step(step: CutCall, values: Mapping[Any, Any], state: Mapping[str, Tensor]) -> Any:
    """The value of this step, as the submodel computes it."""
    value, call = StepValues(step, values, state), step.call
    if call.target == "index_select":
        return take(value(call.args[0]), call.args[1], call.args[2])
    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), value)
    return call.target(*args, **kwargs)


def take(value: Tensor, dim: int, positions: Any) -> Tensor:
    """These positions along the dim: a view where they are consecutive."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return value.narrow(dim, first, last - first + 1)
    return value.index_select(dim, torch.as_tensor(positions, device=value.device))


def last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Per node, what nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for x in node.all_input_nodes:
            last[x] = node
    uses: dict[fx.Node, list[fx.Node]] = {}
    for x, node in last.items():
        uses.setdefault(node, []).append(x)
    return uses
