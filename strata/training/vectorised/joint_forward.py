"""A cut's operations, split into what is frozen and what is trained, with a way to run each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from strata.graph.rewrite import CutCall, steps
from strata.ops import operator_of
from strata.ops.channels import family
from strata.training.stepwise import StepValues, last_uses, run_step, take

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

Compute = Callable[[Mapping[Any, Any]], Any]  # values so far (nodes and parameter names) -> the operation's value
Rule = Callable[["JointForward", CutCall, dict[Any, bool]], Compute]  # with: which values are maps, to be completed

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]  # a value, scale, shift and eps


class NotVectorisable(Exception):
    """This network, or this use of an operation, has no grouped form."""


@dataclass(frozen=True)
class Form:
    """How the devices' values lie side by side, and how each family of operations runs on them: `rules` by what
    `Operator.vectorised` says."""

    side_by_side: Callable[[list[Tensor]], Tensor]  # one map per device, [batch, channels, height, width]
    take: Callable[[Tensor, int, Any], Tensor]  # of maps, these channels of every device; with the number of devices
    concatenate: Callable[[list[Tensor], int], Tensor]  # maps, channel after channel of each device; with their number
    features: Callable[[Tensor, int], Tensor]  # of maps, with the number of devices: [devices, batch, features]
    batch_norm: Norm  # of maps
    rules: dict[str, Rule] = field(default_factory=dict)

    def rule(self, *names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            self.rules.update(dict.fromkeys(names, function))
            return function

        return register


class JointForward:
    """The operations of both parts as Python closures, in execution order, with what each makes free afterwards."""

    def __init__(self, graph: ChannelGraph, cut: Cut, devices: int, form: Form, group: int | None = None) -> None:
        mode = graph.mode("train")
        ops = graph.sized(cut, 2)
        trains = {op.name: op.requires_grad for op in ops if op.kind == "op"}
        shapes = {op.name: op.shape for op in ops}
        self.devices, self.form, self.group = devices, form, group
        name = graph.output_named(cut.output)
        self.output = mode.outputs[name]
        needed = mode.needed(name)
        self.inputs = mode.inputs
        self.multiplied: set[str] = set()  # weights of linear layers: [devices, out, in]
        self.used: set[str] = set()
        self._frozen: list[CutCall] = []
        self._trained: list[tuple[fx.Node, Compute]] = []
        self.boundary: dict[Any, None] = {}
        maps: dict[Any, bool] = {}
        constants = {str(n.target) for n in needed if n.op == "get_attr"} - set(cut.shapes)
        if constants:
            raise NotVectorisable(f"the network holds a constant, {min(constants)}")
        for step in steps(mode, graph.kept_table(cut)):
            node = step.node
            if node not in needed:
                continue
            if not trains.get(node.name, False):
                behind_trained = any(trains.get(x.name, False) for x in node.all_input_nodes)
                if behind_trained and shapes[node.name] is not None:
                    raise NotVectorisable(f"{node.target} without gradient behind trained layers")
                if not behind_trained and (node.users or node is self.output):
                    if family(node) == "batch_norm" and not node.args[5]:
                        raise NotVectorisable("a frozen batch norm with fixed statistics")
                    self._frozen.append(step)
                continue
            for x in node.all_input_nodes:
                is_size = x.op == "call_function" and shapes[x.name] is None
                if x.op != "get_attr" and not is_size and not trains.get(x.name, False):
                    self.boundary[x] = None
                    maps[x] = len(shapes[x.name]) == 4
            form_name = operator_of(node.target).vectorised
            rule = None if form_name is None else form.rules.get(form_name)
            if rule is None:
                raise NotVectorisable(f"{node.target} has no grouped form")
            self._trained.append((node, rule(self, step, maps)))
        self.frozen_names = sorted(
            {str(x.target) for step in self._frozen for x in step.node.all_input_nodes if x.op == "get_attr"}
        )
        self._last_frozen_use = last_uses([step.node for step in self._frozen])
        if not self._trained:
            raise NotVectorisable("nothing is trained")
        self._last_use = last_uses([node for node, _ in self._trained])

    def run_frozen(self, state: Mapping[str, Tensor], batch: Sequence[Tensor]) -> dict[Any, Tensor]:
        values: dict[Any, Any] = dict(zip(self.inputs, batch, strict=True))
        keep = set(self.boundary)
        for step in self._frozen:
            values[step.node] = self._plain(step, values, state)
            for spent in self._last_frozen_use.get(step.node, ()):
                if spent not in keep:
                    values.pop(spent, None)
        return {node: values[node] for node in self.boundary}

    def _plain(self, step: CutCall, values: Mapping[Any, Any], state: Mapping[str, Tensor]) -> Any:
        """One operation of the frozen part; batch norms use the batch's statistics and keep none."""
        if family(step.node) != "batch_norm":
            return run_step(step, values, state)
        x, weight, bias, _, _, _, _, eps, _ = map(StepValues(step, values, state), step.node.args)
        return self._by_groups(batch_norm, x, weight, bias, eps)

    def normed(self, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
        """A batch norm of the trained part."""
        return self._by_groups(self.form.batch_norm, x, scale, shift, eps)

    def _by_groups(self, norm: Norm, x: Tensor, *rest: Any) -> Tensor:
        """Samples are dim 0 of `x` where there are groups."""
        if self.group is None or len(x) <= self.group:
            return norm(x, *rest)
        return torch.cat([norm(part, *rest) for part in x.split(self.group)])

    def joined(self, values: list[Tensor]) -> Tensor:
        """The devices' own values at the boundary as one."""
        return self.form.side_by_side(values) if values[0].dim() == 4 else torch.stack(values)

    def run_trained(self, own: Mapping[str, Tensor], values: dict[Any, Any]) -> Tensor:
        values = {**values, **own}
        for node, run in self._trained:
            values[node] = run(values)
            for spent in self._last_use.get(node, ()):
                values.pop(spent, None)
        return values[self.output]

    def input(self, step: CutCall, node: Any) -> Compute:
        """How to get an operand, cut where the step says so."""
        if not isinstance(node, fx.Node):
            return lambda values: node
        if node.op == "get_attr":
            raise NotVectorisable("a parameter used like a value")
        cuts = [cut for cut in step.cuts if cut.input is node]
        if not cuts:
            return lambda values: values[node]
        (cut,) = cuts
        if cut.dim != 1:
            raise NotVectorisable("a cut along another dim than channels")
        if len(node.meta["val"].shape) != 4:  # features: [devices, batch, features]
            return lambda values: take(values[node], 2, cut.positions)
        return lambda values: self.form.take(values[node], self.devices, cut.positions)

    def parameter(self, node: Any) -> str:
        """The name of a parameter that the operation takes."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            raise NotVectorisable("a weight that is computed")
        if str(node.target) in self.used or len(node.users) > 1:
            raise NotVectorisable("a weight that is used twice")
        self.used.add(str(node.target))
        return str(node.target)


def batch_norm(x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
    """By the batch's statistics. Unlike torch.nn.functional's it takes a single value per channel, as SubModel does."""
    return torch.batch_norm(x, scale, shift, None, None, True, 0.0, eps, torch.backends.cudnn.enabled)
