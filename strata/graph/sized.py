"""SizedOp: one value of a cut graph with its shape. What costs are counted on, without building the submodel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from strata.graph.cut import Cut
from strata.graph.rewrite import steps
from strata.graph.values import BatchSize
from strata.ops import operator_of
from strata.ops.resize import Call
from strata.ops.sized import Ref, SizedOp

if TYPE_CHECKING:
    from strata.graph.graph import ChannelGraph, KeptTable, Mode

Shape = tuple[int, ...]


@dataclass
class _Static:
    """What does not change from cut to cut, per node."""

    sizes: list[list[tuple[int, int]]]  # per output, per dim: (constant, per sample)
    dtype: torch.dtype | None
    is_list: bool
    module: str
    differentiable: bool
    # the call as it is, where nothing about it depends on the cut
    inputs: tuple[str, ...]
    args: Any
    kwargs: Any


def sized_ops(
    graph: ChannelGraph, cut: Cut, table: KeptTable, batch: int, mode_name: str, output: str
) -> list[SizedOp]:
    mode = graph.mode(mode_name)
    static = graph.static(mode_name)
    leaf_outputs = graph.leaf_outputs if mode_name == "train" else {}
    parameters = set(graph.parameter_names)
    ops: list[SizedOp] = []
    needs_grad: dict[str, bool] = {}

    def add(op: SizedOp) -> None:
        ops.append(op)
        needs_grad[op.name] = op.requires_grad

    needed = mode.needed(output)
    detached = graph.detached(cut) if mode_name == "train" else {}
    for node, given in zip(mode.inputs, graph.inputs.inputs, strict=True):
        add(SizedOp(node.name, "input", None, (), (), {}, (batch, *given.shape), static[node].dtype, False))
    for node in mode.graph.nodes:
        if node.op == "get_attr" and node in needed:
            name = str(node.target)
            kind = "parameter" if name in parameters else "buffer"
            shape = cut.shapes[name] if name in cut.shapes else graph.constant_shape(name, table)
            dtype = graph.state_dtypes.get(name) or graph.constants[name].dtype
            trains = kind == "parameter" and name not in cut.frozen
            add(SizedOp(node.name, kind, None, (), (), {}, shape, dtype, trains, name))
    shapes: dict[str, Shape] = {}
    for step in steps(mode, table):
        if step.node not in needed:
            continue
        node, one = step.node, static[step.node]
        renamed: dict[fx.Node, str] = {}
        for position, weight in enumerate(detached.get(node, ())):
            name, own = f"{node.name}_detached_{position}", str(weight.target)
            shape, target = cut.shapes[own], torch.ops.aten.detach.default
            dtype = graph.state_dtypes[own]
            add(SizedOp(name, "cut", target, (weight.name,), (Ref(weight.name),), {}, shape, dtype, False))
            renamed[weight] = name
        for position, input_cut in enumerate(step.cuts):
            name = f"{node.name}_cut_{position}"
            before = renamed.get(input_cut.input, input_cut.input.name)
            sizes = list(shapes.get(before) or _shape_of(mode, table, static, input_cut.input, batch)[0])
            sizes[input_cut.dim] = len(input_cut.positions)
            call = _real(input_cut.call(Ref(before)))
            dtype = static[input_cut.input].dtype
            add(SizedOp(name, "cut", call.target, (before,), call.args, {}, tuple(sizes), dtype, needs_grad[before]))
            shapes[name] = tuple(sizes)
            renamed[input_cut.input] = name
        call = _real(step.call)
        if not renamed and call.args is node.args and call.kwargs == node.kwargs:
            inputs, args, kwargs = one.inputs, one.args, one.kwargs
        else:
            inputs = tuple(renamed.get(x, x.name) for x in node.all_input_nodes)
            args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n, r=renamed: Ref(r.get(n, n.name)))  # type: ignore[misc]
        outputs = _shape_of(mode, table, static, node, batch)
        requires_grad = one.differentiable and any(needs_grad[x] for x in inputs)
        shape_field: Any = None if one.dtype is None else (outputs if one.is_list else outputs[0])
        add(
            SizedOp(
                node.name,
                "op",
                call.target,
                inputs,
                args,
                kwargs,
                shape_field,
                one.dtype,
                requires_grad,
                module=one.module,
                leaf_outputs=leaf_outputs.get(node, 0),
            )
        )
    returned = mode.outputs[output].name
    last = next(op for op in ops if op.name == returned)
    arguments = (Ref(returned),)
    add(SizedOp("output", "output", None, (returned,), arguments, {}, last.shape, last.dtype, last.requires_grad))
    return ops


def _real(call: Call) -> Call:
    if call.target == "index_select":
        return Call(torch.ops.aten.index_select.default, call.args, call.kwargs)
    return call


def _shape_of(mode: Mode, table: KeptTable, static: dict[fx.Node, _Static], node: fx.Node, batch: int) -> list[Shape]:
    vectors = mode.vectors.get(node)
    outputs = []
    for position, sizes in enumerate(static[node].sizes):
        shape = [constant + per_sample * batch for constant, per_sample in sizes]
        vector = vectors[position] if isinstance(vectors, list) else vectors
        if vector is not None:
            count = table.counts[vector.slots]
            shape[vector.dim] = count * batch // 2 if vector.batched else count
        outputs.append(tuple(shape))
    return outputs


def static_of(graph: fx.Graph) -> dict[fx.Node, _Static]:
    found: dict[fx.Node, _Static] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        is_list = isinstance(value, (list, tuple))
        tensors = [v for v in (value if is_list else [value]) if isinstance(v, Tensor)]
        sizes = [[_linear(size) for size in t.shape] for t in tensors]
        dtype = tensors[0].dtype if tensors else None
        stack = node.meta.get("nn_module_stack")
        module = list(stack.values())[-1][0] if stack else ""
        continuous = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        differentiable = continuous and operator_of(node.target).differentiable
        inputs = tuple(x.name for x in node.all_input_nodes)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: Ref(n.name))
        found[node] = _Static(sizes, dtype, is_list, module, differentiable, inputs, args, kwargs)
    return found


def _linear(size: Any) -> tuple[int, int]:
    return (size.constant, size.per_sample) if isinstance(size, BatchSize) else (size, 0)
