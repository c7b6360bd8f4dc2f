"""Rules that hold however maps lie in memory: element by element, and on features."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from strata.cutting.rewrite import Step
from strata.cutting.rules import argument, family
from strata.training.grouped.plan import Form, NotVectorisable, Plan, Run

ELEMENTWISE = """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus
    add sub mul div neg abs exp sqrt square clone contiguous
""".split()


def _elementwise(plan: Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    values = [x for x in node.all_input_nodes if x.op != "get_attr"]
    kinds = {maps[x] for x in values}
    if len(kinds) != 1:
        raise NotVectorisable("maps and features together")
    getters = [plan.input(step, a) for a in node.args]
    target, kwargs = _functional(node), dict(node.kwargs)
    maps[node] = kinds.pop()
    return lambda v: target(*[get(v) for get in getters], **kwargs)


def _functional(node: fx.Node) -> Any:
    """Not in place: a value may be a view of what another operation still needs."""
    name = family(node)
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    return getattr(packet, node.target._overloadname)  # type: ignore[union-attr]


def _linear(plan: Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    if maps[node.args[0]] or len(node.meta["val"].shape) != 2:
        raise NotVectorisable("a linear layer on something else than features")
    get, weight, bias = plan.input(step, node.args[0]), plan.parameter(node.args[1]), argument(node, 2, "bias")
    plan.multiplied.add(weight)
    maps[node] = False
    if bias is None:
        return lambda v: torch.bmm(get(v), v[weight].transpose(1, 2))
    bias_name = plan.parameter(bias)
    return lambda v: torch.baddbmm(v[bias_name].view(plan.devices, 1, -1), get(v), v[weight].transpose(1, 2))


def _dropout(plan: Plan, step: Step, maps: dict[Any, bool]) -> Run:
    node = step.node
    if argument(node, 1, "p") and argument(node, 2, "train"):
        raise NotVectorisable("dropout: each device draws from its own generator")
    maps[node] = maps[node.args[0]]
    return plan.input(step, node.args[0])


def add_common_rules(form: Form) -> None:
    form.rule(*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE))(_elementwise)
    form.rule("linear")(_linear)
    form.rule("dropout", "dropout_")(_dropout)
