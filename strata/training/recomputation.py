"""Activation checkpointing: autograd keeps the inputs of segments of the forward pass and computes the rest anew.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. A device's update has the same bits as without: the
autograd graph is the same one, only what it saved comes from a second run of each segment (torch.utils.checkpoint,
not re-entrant). In that second run dropout draws the same numbers and running statistics stay as the first left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from strata.core.errors import BadInput
from strata.execution.placement import Placement, writes
from strata.training import kernels

aten = torch.ops.aten
MOMENTUM: dict[Any, int] = {
    aten.batch_norm.default: 6,
    aten.instance_norm.default: 6,
}  # where it stands among the arguments

Code = Callable[..., tuple[Any, ...]]  # the module and the segment's inputs -> its outputs


@dataclass(frozen=True)
class Segment:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gone: tuple[str, ...]  # inputs that nothing after it needs
    first: Code
    again: Code | None  # None: it runs once
    random: bool

    def run(self, module: nn.Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
        again = self.again
        if again is None:
            return self.first(module, *inputs)
        ran = False

        def code(*inputs: Any) -> tuple[Any, ...]:
            nonlocal ran
            chosen, ran = (again if ran else self.first), True
            return chosen(module, *inputs)

        by_own = kernels.in_use()  # the second run, within backward, has to round like the first
        found: tuple[Any, ...] = checkpoint(
            code, *inputs, use_reentrant=False, preserve_rng_state=self.random,
            context_fn=lambda: (nullcontext(), kernels.own_convolutions(by_own)),
        )  # fmt: skip
        return found


class Segmented:
    """The forward pass of a SubModel in training, in segments. Knows the module's code, not the module."""

    def __init__(self, graph: fx.Graph, placement: Placement) -> None:
        in_graph = [node for node in graph.nodes if node.op == "call_function"]
        nodes = [in_graph[index] for index in placement.order]
        self.inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        (self.output,) = (source.name for node in graph.nodes if node.op == "output" for source in node.all_input_nodes)
        bounds = [placement.begin, *placement.cuts, len(nodes)]
        parts = [nodes[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        random: list[bool | None] = [*placement.random, None]  # None: not recomputed
        if placement.begin > 0:
            parts, random = [nodes[: placement.begin], *parts], [None, *random]
        self.segments = [
            _segment(part, nodes, self.output, draws) for part, draws in zip(parts, random, strict=True)
        ]  # fmt: skip

    def __call__(self, module: nn.Module, *batch: Tensor) -> Tensor:
        values: dict[str, Any] = dict(zip(self.inputs, batch, strict=True))
        for segment in self.segments:
            inputs = [values[name] for name in segment.inputs]
            for name in segment.gone:
                del values[name]
            values |= zip(segment.outputs, segment.run(module, inputs), strict=True)
            del inputs
        result: Tensor = values[self.output]
        return result


def _segment(part: Sequence[fx.Node], nodes: Sequence[fx.Node], output: str, random: bool | None) -> Segment:
    inside = set(part)
    end = nodes.index(part[-1]) + 1
    later = {source for node in nodes[end:] for source in node.all_input_nodes}
    inputs = dict.fromkeys(
        source for node in part for source in node.all_input_nodes if source not in inside and source.op != "get_attr"
    )
    outputs = [node for node in part if node in later or node.name == output]
    return Segment(
        tuple(node.name for node in inputs),
        tuple(node.name for node in outputs),
        tuple(node.name for node in inputs if node not in later and node.name != output),
        _code(part, list(inputs), outputs),
        None if random is None else _code([_still(node) for node in part], list(inputs), outputs),
        bool(random),
    )


def _still(node: fx.Node) -> fx.Node | tuple[fx.Node, tuple[Any, ...]] | None:
    """The operation as the second run has it: buffers stay as they are. None: it only changes a buffer."""
    index = MOMENTUM.get(node.target)
    if index is not None:
        # with momentum 0 the running statistics stay; None in their place would change what autograd keeps
        return node, (*node.args[:index], 0.0, *node.args[index + 1 :])
    changed = node.args[0] if node.args else None
    if not writes(node) or not isinstance(changed, fx.Node) or changed.op != "get_attr":
        return node
    if node.users or any(user is not node and user.target not in MOMENTUM for user in changed.users):
        raise BadInput(
            f"activation checkpointing would run {node.target} on {changed.target} twice: a buffer that the forward "
            "pass both changes and reads cannot be recomputed; train this model without it"
        )
    return None


def _code(
    part: Sequence[fx.Node | tuple[fx.Node, tuple[Any, ...]] | None],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> Code:
    """Python code for these operations; each value is dropped after its last use."""
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: new.placeholder(node.name) for node in inputs}
    for entry in part:
        if entry is None:
            continue
        node, args = entry if isinstance(entry, tuple) else (entry, entry.args)
        for source in node.all_input_nodes:
            if source not in made:
                made[source] = new.get_attr(str(source.target))
        args, kwargs = fx.node.map_arg((args, node.kwargs), lambda n: made[n])
        made[node] = new.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    new.output(tuple(made[node] for node in outputs))
    code = new.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<strata segment>", "exec"), scope)
    found: Code = scope["forward"]
    return found
