"""Several devices with the same Cut as one network: their channels lie side by side and every convolution is grouped.

Only for simulation. Narrow networks spend nearly all their time in overhead; n of them as one spend it once.
Values of the trained part are either maps, [batch, devices * channels, height, width], in which batch norm and grouped
convolution keep devices apart by themselves, or features, [devices, batch, features], multiplied by `baddbmm`.
The frozen part has the same weights on all devices and runs device by device, without autograd.
A network with an operation that has no rule here is not vectorised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from strata.cutting.rewrite import Step, steps
from strata.cutting.rules import argument, family
from strata.training.interpreting import StepValues, last_uses, run_step, take

if TYPE_CHECKING:
    from strata.cutting import ChannelGraph, Cut


class NotVectorisable(Exception):
    """This network, or this use of an operation, has no grouped form."""


class Grouped(nn.Module):
    """`devices` copies of the cut's submodel. Parameter names are the full model's with dots replaced."""

    def __init__(
        self, graph: ChannelGraph, cut: Cut, devices: int, device: str = "cpu", compiled: bool = False
    ) -> None:
        super().__init__()
        self.cut, self.devices, self.device = cut, devices, device
        self._plan = _Plan(graph, cut, devices)
        self.own: dict[str, nn.Parameter] = {}
        for name in cut.trained:
            if name not in self._plan.used:
                raise NotVectorisable(f"{name} is not used")
            parameter = nn.Parameter(self._zeros(name))
            self.register_parameter(name.replace(".", "_"), parameter)
            self.own[name] = parameter
        self.to(device)
        self.frozen: list[dict[str, Tensor]] = []
        self._trained: Callable[..., Tensor] = _Trained(self._plan, self.own)
        if compiled:  # of straight code: a compiler would break the graph at every closure
            self._trained = torch.compile(fx.symbolic_trace(self._trained), dynamic=False)

    def load(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """What each device received: of cuts of the same structure, maybe of different channels."""
        with torch.no_grad():
            for name, parameter in self.own.items():
                parameter.copy_(torch.stack([one[name] for one in tensors]).view(parameter.shape))
        self.frozen = [
            {name: _arranged(one[name].to(self.device)) for name in self._plan.frozen_names} for one in tensors
        ]

    def updates(self) -> list[dict[str, Tensor]]:
        """Per device, the trained parameters in the cut's shapes."""
        split = {
            name: parameter.detach().cpu().reshape(self.devices, *self.cut.shapes[name])
            for name, parameter in self.own.items()
        }
        return [{name: parts[d].clone() for name, parts in split.items()} for d in range(self.devices)]

    def forward(self, images: list[Tensor]) -> Tensor:
        """One batch per device, all of one size; logits [devices, batch, classes]."""
        with torch.no_grad():
            pairs = zip(self.frozen, images, strict=True)
            boundary = [self._plan.run_frozen(state, _arranged(x.to(self.device))) for state, x in pairs]
        return self._trained([_side_by_side([one[node] for one in boundary]) for node in self._plan.boundary])

    def _zeros(self, name: str) -> Tensor:
        copies = torch.zeros(self.devices, *self.cut.shapes[name])
        return _arranged(copies if name in self._plan.multiplied else copies.flatten(0, 1))


class _Trained(nn.Module):
    """The trained part as a function of the values at its boundary, in the plan's order."""

    def __init__(self, plan: _Plan, own: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._plan, self._names = plan, {name: name.replace(".", "_") for name in own}
        for name, parameter in own.items():
            self.register_parameter(self._names[name], parameter)

    def forward(self, boundary: Sequence[Tensor]) -> Tensor:
        own = {name: getattr(self, attribute) for name, attribute in self._names.items()}
        return self._plan.run_trained(own, {node: boundary[i] for i, node in enumerate(self._plan.boundary)})


def _arranged(tensor: Tensor) -> Tensor:
    """Convolutions run up to twice as fast on CPUs with channels last in memory."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()


def _side_by_side(values: list[Tensor]) -> Tensor:
    return _arranged(torch.cat(values, 1)) if values[0].dim() == 4 else torch.stack(values)


Run = Callable[[Mapping[Any, Any]], Any]  # values so far (nodes and parameter names) -> the operation's value


class _Plan:
    """The operations of both parts as Python closures, in execution order, with what each makes free afterwards."""

    def __init__(self, graph: ChannelGraph, cut: Cut, devices: int) -> None:
        mode = graph.mode("train")
        ops = graph.sized(cut, 2)
        trains = {op.name: op.requires_grad for op in ops if op.kind == "op"}
        shapes = {op.name: op.shape for op in ops}
        self.devices = devices
        self.output = mode.output
        self.input = next(node for node in mode.graph.nodes if node.op == "placeholder")
        self.multiplied: set[str] = set()  # weights of linear layers: [devices, out, in]
        self.used: set[str] = set()
        self._frozen: list[Step] = []
        self._trained: list[tuple[fx.Node, Run]] = []
        self.boundary: dict[Any, None] = {}
        maps: dict[Any, bool] = {}
        constants = {str(n.target) for n in mode.graph.nodes if n.op == "get_attr"} - set(cut.shapes)
        if constants:
            raise NotVectorisable(f"the network holds a constant, {min(constants)}")
        for step in steps(mode, graph.kept_table(cut)):
            node = step.node
            if not trains.get(node.name, False):
                behind_trained = any(trains.get(x.name, False) for x in node.all_input_nodes)
                if behind_trained and shapes[node.name] is not None:
                    raise NotVectorisable(f"{node.target} without gradient behind trained layers")
                if not behind_trained and (node.users or node is self.output):
                    self._frozen.append(step)
                continue
            for x in node.all_input_nodes:
                is_size = x.op == "call_function" and shapes[x.name] is None
                if x.op != "get_attr" and not is_size and not trains.get(x.name, False):
                    self.boundary[x] = None
                    maps[x] = len(shapes[x.name]) == 4
            rule = _RULES.get(family(node))
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

    def run_frozen(self, state: Mapping[str, Tensor], x: Tensor) -> dict[Any, Tensor]:
        values: dict[Any, Any] = {self.input: x}
        keep = set(self.boundary)
        for step in self._frozen:
            values[step.node] = _plain(step, values, state)
            for spent in self._last_frozen_use.get(step.node, ()):
                if spent not in keep:
                    values.pop(spent, None)
        return {node: values[node] for node in self.boundary}

    def run_trained(self, own: Mapping[str, Tensor], values: dict[Any, Any]) -> Tensor:
        values = {**values, **own}
        for node, run in self._trained:
            values[node] = run(values)
            for spent in self._last_use.get(node, ()):
                values.pop(spent, None)
        return values[self.output]

    def parameter(self, node: Any) -> str:
        """The name of a parameter that the operation takes; each may be taken once."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            raise NotVectorisable("a weight that is computed")
        self.used.add(str(node.target))
        return str(node.target)


def _plain(step: Step, values: Mapping[Any, Any], state: Mapping[str, Tensor]) -> Any:
    """One operation of the frozen part; batch norms use the batch's statistics and keep none."""
    if family(step.node) != "batch_norm":
        return run_step(step, values, state)
    x, weight, bias, _, _, _, momentum, eps, _ = map(StepValues(step, values, state), step.node.args)
    return functional.batch_norm(x, None, None, weight, bias, True, momentum, eps)


# --- rules: one per family of operations, returning how to run it on grouped values ------------------------------

Rule = Callable[[_Plan, Step, dict[Any, bool]], Run]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


def _input(plan: _Plan, step: Step, node: Any) -> Callable[[Mapping[Any, Any]], Any]:
    """How to get an input, cut where the step says so."""
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

    def get(values: Mapping[Any, Any]) -> Tensor:
        parts = values[node].unflatten(1, (plan.devices, -1))
        taken = take(parts, 2, cut.positions).flatten(1, 2)
        return taken.contiguous(memory_format=torch.channels_last)

    return get


@rule("conv2d")
def _convolution(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node, call = step.node, step.call
    get = _input(plan, step, node.args[0])
    if not maps[node.args[0]]:
        raise NotVectorisable("a convolution of something else than maps")
    weight, bias = plan.parameter(node.args[1]), argument(node, 2, "bias")
    bias_name = None if bias is None else plan.parameter(bias)
    stride = argument(node, 3, "stride", 1)
    padding = argument(node, 4, "padding", 0)
    dilation = argument(node, 5, "dilation", 1)
    groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups", 1)
    if isinstance(padding, str):
        raise NotVectorisable("padding given by name")
    maps[node] = True
    return lambda v: functional.conv2d(
        get(v), v[weight], None if bias_name is None else v[bias_name], stride, padding, dilation, groups * plan.devices
    )


@rule("batch_norm")
def _batch_norm(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    get = _input(plan, step, node.args[0])
    if not maps[node.args[0]] or not node.args[5]:
        raise NotVectorisable("batch norm of features, or with fixed statistics")
    scale, shift = (None if p is None else plan.parameter(p) for p in node.args[1:3])
    eps: Any = node.args[7]
    maps[node] = True
    return lambda v: functional.batch_norm(
        get(v), None, None, None if scale is None else v[scale], None if shift is None else v[shift], True, 0.0, eps
    )


@rule("group_norm")
def _group_norm(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    get = _input(plan, step, node.args[0])
    if not maps[node.args[0]]:
        raise NotVectorisable("group norm of features")
    groups: Any = step.call.args[1]
    affine = (argument(node, 2, "weight"), argument(node, 3, "bias"))
    scale, shift = (None if p is None else plan.parameter(p) for p in affine)
    eps = argument(node, 4, "eps", 1e-5)
    maps[node] = True
    return lambda v: functional.group_norm(
        get(v), groups * plan.devices, None if scale is None else v[scale], None if shift is None else v[shift], eps
    )


ELEMENTWISE = """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus
    add sub mul div neg abs exp sqrt square clone contiguous
""".split()


@rule(*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE))
def _elementwise(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    values = [x for x in node.all_input_nodes if x.op != "get_attr"]
    kinds = {maps[x] for x in values}
    if len(kinds) != 1:
        raise NotVectorisable("maps and features together")
    getters = [_input(plan, step, a) for a in node.args]
    target, kwargs = _functional(node), dict(node.kwargs)
    maps[node] = kinds.pop()
    return lambda v: target(*[get(v) for get in getters], **kwargs)


def _functional(node: fx.Node) -> Any:
    """Not in place: a value may be a view of what another operation still needs."""
    name = family(node)
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    return getattr(packet, node.target._overloadname)  # type: ignore[union-attr]


POOLING = "avg_pool2d max_pool2d adaptive_avg_pool2d adaptive_max_pool2d".split()


@rule(*POOLING)
def _pooling(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    if not maps[node.args[0]]:
        raise NotVectorisable("pooling of something else than maps")
    get, target, rest, kwargs = _input(plan, step, node.args[0]), node.target, node.args[1:], dict(node.kwargs)
    maps[node] = True
    return lambda v: target(get(v), *rest, **kwargs)  # type: ignore[operator]


@rule("mean")
def _mean(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    dims = argument(node, 1, "dim")
    keep = argument(node, 2, "keepdim", False)
    if not maps[node.args[0]] or dims is None or sorted(d % 4 for d in dims) != [2, 3]:
        raise NotVectorisable("a mean over something else than positions")
    get = _input(plan, step, node.args[0])
    maps[node] = keep
    if keep:
        return lambda v: get(v).mean((2, 3), keepdim=True)
    return lambda v: get(v).mean((2, 3)).unflatten(1, (plan.devices, -1)).transpose(0, 1)


@rule("flatten", "view", "reshape")
def _flatten(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    """Maps to features: each device's channels and positions in a row, in the order of the single network."""
    node = step.node
    if not maps[node.args[0]] or len(node.meta["val"].shape) != 2:
        raise NotVectorisable("a change of shape other than from maps to features")
    get = _input(plan, step, node.args[0])
    maps[node] = False
    return lambda v: get(v).unflatten(1, (plan.devices, -1)).flatten(2).transpose(0, 1)


@rule("linear")
def _linear(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    if maps[node.args[0]] or len(node.meta["val"].shape) != 2:
        raise NotVectorisable("a linear layer on something else than features")
    get, weight, bias = _input(plan, step, node.args[0]), plan.parameter(node.args[1]), argument(node, 2, "bias")
    plan.multiplied.add(weight)
    maps[node] = False
    if bias is None:
        return lambda v: torch.bmm(get(v), v[weight].transpose(1, 2))
    bias_name = plan.parameter(bias)
    return lambda v: torch.baddbmm(v[bias_name].view(plan.devices, 1, -1), get(v), v[weight].transpose(1, 2))


@rule("dropout", "dropout_")
def _dropout(plan: _Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    if argument(node, 1, "p") and argument(node, 2, "train"):
        raise NotVectorisable("dropout: each device draws from its own generator")
    maps[node] = maps[node.args[0]]
    return _input(plan, step, node.args[0])
