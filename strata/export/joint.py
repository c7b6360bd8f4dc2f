"""Graphs of a step's methods, in which everything that the network holds is an input: no weights in the program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from strata.export.operators import ops

aten = torch.ops.aten
INPUT, LABELS, LOSS, SCORES = "@input", "@labels", "@loss", "@scores"
EXAMPLE = 2  # samples, at the least: torch.export takes 1 for a constant
DROPPED = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Traced:
    """One method. `inputs` and `outputs` are in the program's order, by names of tensors or those with an @; an output
    with a tensor's name is its gradient, or in `statistics` its new value."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def traced_training(module: nn.Module, x: Tensor, labels: Tensor, most: int, slots: Mapping[str, int] | None) -> Traced:
    """Forward, loss and backward of up to `most` samples. `slots`: where gradients are summed up over the parts of a
    batch, instead of being results; by parameter."""
    from torch._decomp import core_aten_decompositions
    from torch.export.exported_program import _decompose_exported_program

    with _quietly():
        program = torch.export.export(
            module,
            (x, labels),
            dynamic_shapes=(_dynamic(most), _dynamic(most)),
            strict=False,
        )
        program = _decompose_exported_program(
            program,
            cia_to_decomp={},
            python_decomp_table=core_aten_decompositions(),
            joint_loss_index=0,
            decompose_custom_triton_ops=False,
        )
    return _without_weights(program, (INPUT, LABELS), (x, labels), most, slots)


def traced_evaluation(module: nn.Module, x: Tensor, most: int, statistics: Sequence[str] = ()) -> Traced:
    """Scores of up to `most` samples, and the statistics that the module returns beside them."""
    with _quietly(), torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=(_dynamic(most),), strict=False)
    return _without_weights(program, (INPUT,), (x,), most, None, (SCORES, *statistics))


def _dynamic(most: int) -> dict[int, Dim] | None:
    """Any number of samples up to this."""
    return {0: Dim("batch", min=1, max=most)} if most > 1 else None


def _without_weights(
    program: ExportedProgram,
    given: Sequence[str],
    examples: Sequence[Tensor],
    most: int,
    slots: Mapping[str, int] | None,
    outputs: Sequence[str] | None = None,
) -> Traced:
    """The program's graph with parameters and buffers as inputs, exported once more as a plain function."""
    graph, root = fx.Graph(), nn.Module()
    names: list[str] = []
    values: list[Tensor] = []
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    waiting = iter(zip(given, examples, strict=True))
    copies: dict[fx.Node, fx.Node] = {}
    taken: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                name, value = next(waiting)
            elif not node.users:
                continue
            else:
                assert spec.target is not None
                name = spec.target.removeprefix("network.")
                value = _value(program, spec.target)
                if spec.kind is InputKind.CONSTANT_TENSOR or spec.persistent is False:
                    constant = f"constant_{len(list(root.buffers()))}"
                    root.register_buffer(constant, value.detach().clone())
                    copies[node] = graph.get_attr(constant)
                    continue
            copies[node] = graph.placeholder(f"value_{len(names)}")
            names.append(name)
            values.append(value.detach())
        elif node.op == "output":
            taken = [one for one in node.args[0] if isinstance(one, fx.Node)]
        elif node.target in DROPPED or _changes_nothing(node):
            copies[node] = copies[node.args[0]]
        elif node.target is aten.empty_permuted.default:  # to be written over: there is no kernel for it
            size = fx.node.map_arg(node.args[0], lambda one: copies[one])
            copies[node] = graph.call_function(aten.full.default, (size, 0), {"dtype": node.meta["val"].dtype})
        else:
            copies[node] = graph.node_copy(node, lambda one: copies[one])
    if outputs is None:
        outputs = [_output_name(spec) for spec in program.graph_signature.output_specs]
    results = [copies[node] for node in taken]
    if slots is not None:
        named = zip(outputs, results, strict=True)
        results = [one if name == LOSS else _summed(graph, one, slots[name]) for name, one in named]
    graph.output(tuple(results))
    module = fx.GraphModule(root, graph)
    dynamic = tuple(_dynamic(most) if name in (INPUT, LABELS) else None for name in names)
    with _quietly(), torch.no_grad():
        again = torch.export.export(_Plain(module), tuple(values), dynamic_shapes=(dynamic,), strict=False)
    return Traced(again, tuple(names), tuple(outputs))


class _Plain(nn.Module):
    """Node by node, so that every node keeps its line of the user's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return fx.Interpreter(self.module).run(*values)


def _summed(graph: fx.Graph, gradient: fx.Node, slot: int) -> fx.Node:
    """At once, so that the gradient's own room is free again."""
    with graph.inserting_after(gradient):
        return graph.call_function(ops.add_to.default, (gradient, slot))


def _changes_nothing(node: fx.Node) -> bool:
    """To the shape that it has: a copy in a program, which has no views."""
    if node.target is not aten.expand.default:
        return False
    before, after = (list(map(str, one.meta["val"].shape)) for one in (node.args[0], node))  # type: ignore[union-attr]
    return before == after


def _value(program: ExportedProgram, target: str) -> Tensor:
    found = program.state_dict.get(target)
    return program.constants[target] if found is None else found


def _output_name(spec: object) -> str:
    kind, target = spec.kind, spec.target  # type: ignore[attr-defined]
    if kind is OutputKind.LOSS_OUTPUT:
        return LOSS
    assert kind is OutputKind.GRADIENT_TO_PARAMETER and target is not None, spec
    return str(target).removeprefix("network.")


@contextmanager
def _quietly() -> Iterator[None]:
    """torch.export warns of what is meant to be so."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), fx.traceback.preserve_node_meta():  # of which the user's line is a part
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
