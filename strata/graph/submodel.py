"""SubModel: the small network that runs on a device, written from the cut graph, with the full model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        graphs = {mode: _rewritten(self, graph, table, mode, output) for mode in ("train", "eval")}
        forwards = {mode: compiled(one, mode) for mode, one in graphs.items()}
        self._strata: dict[str, Any] = {"cut": cut, "train_graph": graphs["train"], "forwards": forwards}

    def forward(self, *inputs: Tensor) -> Tensor:
        """In the order of the graph's InputSpec."""
        return self._strata["forwards"]["train" if self.training else "eval"](self, *inputs)

    def __getattr__(self, name: str) -> Any:
        """Like this a part of the user's model may be called `cut`: plain attributes would stand in its way."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ("cut", "train_graph") or "_strata" not in self.__dict__:
                raise
            return self._strata[name]


def _rewritten(module: SubModel, graph: ChannelGraph, table: KeptTable, mode_name: str, output: str) -> fx.Graph:
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
    for node in mode.inputs:
        made[node] = new.placeholder(node.name)
    for node in mode.graph.nodes:
        if node.op == "get_attr" and node in needed:
            made[node] = new.get_attr(str(node.target))
    for step in steps(mode, table):
        if step.node not in needed:
            continue
        replaced: dict[fx.Node, fx.Node] = {}
        for cut in step.cuts:
            source = replaced.get(cut.input, made[cut.input])
            replaced[cut.input] = emit(cut.call(source), {})
        made[step.node] = emit(step.call, replaced)
    new.output(made[mode.outputs[output]])
    return new


def compiled(graph: fx.Graph, mode_name: str) -> Callable[..., Tensor]:
    """Its Python code, as a function of the module and its inputs; each value is dropped after its last use."""
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<strata submodel, {mode_name}>", "exec"), scope)
    return scope["forward"]


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
