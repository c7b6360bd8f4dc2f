"""SubModel: the small network that runs on a device, written from the cut graph, with the full model's names."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from strata.graph.cut import Cut
from strata.graph.rewrite import steps
from strata.ops.resize import Call

if TYPE_CHECKING:
    from strata.graph.graph import ChannelGraph, KeptTable


class SubModel(nn.Module):
    """Frozen parameters have requires_grad=False, so that autograd keeps nothing of frozen layers.

    Weights are zeros unless `state` (what Cut.extract gave) is given. `cut` and `train_graph` (for those who run it
    otherwise, such as in segments) can be read, unless the model has a part of that name: it comes first."""

    def __init__(
        self, graph: ChannelGraph, cut: Cut, table: KeptTable, state: Mapping[str, Tensor] | None, output: str
    ) -> None:
        super().__init__()
        parameters = set(graph.parameter_names)
        for name, shape in cut.shapes.items():
            dtype = graph.state_dtypes[name]
            value = state[name] if state is not None else torch.zeros(shape, dtype=dtype)
            if name in parameters:
                _attach(self, name, nn.Parameter(value.detach(), requires_grad=name not in cut.frozen))
            else:
                _attach(self, name, value.detach(), persistent=True)
        for name, value in graph.cut_constants(table).items():
            _attach(self, name, value, persistent=False)
        graphs = {mode: _rewritten(self, graph, cut, table, mode, output) for mode in ("train", "eval")}
        codes = {mode: _code(one) for mode, one in graphs.items()}
        self._strata: dict[str, Any] = {
            "cut": cut, "train_graph": graphs["train"], "codes": codes, "forwards": _compiled(codes)
        }  # fmt: skip

    def forward(self, *inputs: Tensor) -> Tensor:
        """In the order of the graph's InputSpec."""
        return self._strata["forwards"]["train" if self.training else "eval"](self, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        """For torch.save and pickle: the code as text. What comes back runs, and has no train_graph."""
        return {**self.__dict__, "_strata": {key: self._strata[key] for key in ("cut", "codes")}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._strata = {**self._strata, "forwards": _compiled(self._strata["codes"])}

    def __deepcopy__(self, memo: dict[int, Any]) -> SubModel:
        """Weights are copied; what is known of the network is shared."""
        made = SubModel.__new__(SubModel)
        memo[id(self)] = made
        rest = {name: value for name, value in self.__dict__.items() if name != "_strata"}
        made.__dict__.update(copy.deepcopy(rest, memo))
        made.__dict__["_strata"] = self._strata
        return made

    def __getattr__(self, name: str) -> Any:
        """Like this a part of the user's model may be called `cut`: plain attributes would stand in its way."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ("cut", "train_graph") or "_strata" not in self.__dict__:
                raise
            return self._strata[name]


def _rewritten(
    module: SubModel, graph: ChannelGraph, cut: Cut, table: KeptTable, mode_name: str, output: str
) -> fx.Graph:
    """The cut graph; the positions that it takes out of values become buffers of the module."""
    mode = graph.mode(mode_name)
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    indices = 0

    def emit(call: Call, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
        nonlocal indices
        target, args = call.target, call.args
        if target == "index_select":
            name = f"_kept_{mode_name}_{indices}"
            indices += 1
            module.register_buffer(name, torch.tensor(args[2]), persistent=False)
            target, args = torch.ops.aten.index_select.default, (args[0], args[1], new.get_attr(name))
        old_args, old_kwargs = fx.node.map_arg((args, call.kwargs), lambda n: replaced.get(n, made.get(n, n)))
        return new.call_function(target, old_args, old_kwargs)

    needed = mode.needed(output)
    detached = graph.detached(cut) if mode_name == "train" else {}
    for node in mode.inputs:
        made[node] = new.placeholder(node.name)
    for node in mode.graph.nodes:
        if node.op == "get_attr" and node in needed:
            made[node] = new.get_attr(str(node.target))
    for step in steps(mode, table):
        if step.node not in needed:
            continue
        replaced: dict[fx.Node, fx.Node] = {}
        for weight in detached.get(step.node, ()):
            replaced[weight] = new.call_function(torch.ops.aten.detach.default, (made[weight],))
        for one in step.cuts:
            source = replaced.get(one.input, made[one.input])
            replaced[one.input] = emit(one.call(source), {})
        made[step.node] = emit(step.call, replaced)
    new.output(made[mode.outputs[output]])
    return new


@dataclass(frozen=True)
class Code:
    """Of a network: Python in which each value is dropped after its last use, and what it refers to by name."""

    source: str
    modules: Mapping[str, str]  # their full names
    others: Mapping[str, Any]

    def function(self, mode_name: str) -> Callable[..., Tensor]:
        """Of the module and its inputs."""
        scope: dict[str, Any] = {name: importlib.import_module(full) for name, full in self.modules.items()}
        scope |= self.others
        exec(compile(self.source, f"<strata submodel, {mode_name}>", "exec"), scope)
        return scope["forward"]


def _code(graph: fx.Graph) -> Code:
    code = graph.python_code("self")
    modules = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
    return Code(code.src, modules, {name: value for name, value in code.globals.items() if name not in modules})


def _compiled(codes: Mapping[str, Code]) -> dict[str, Callable[..., Tensor]]:
    return {mode: code.function(mode) for mode, code in codes.items()}


def compiled(graph: fx.Graph, mode_name: str) -> Callable[..., Tensor]:
    """Its Python code, as a function of the module and its inputs; each value is dropped after its last use."""
    return _code(graph).function(mode_name)


def _attach(root: nn.Module, name: str, value: Tensor, persistent: bool = True) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module.register_parameter(last, value)
    else:
        module.register_buffer(last, value, persistent=persistent)
