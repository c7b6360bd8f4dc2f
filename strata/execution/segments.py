"""A forward pass in segments: where it is cut, and how it runs so that backward computes most of it anew.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. A step has the same bits as without: the autograd
graph is the same one, only what it saved comes from a second run of each segment (torch.utils.checkpoint, not
re-entrant). In that second run dropout draws the same numbers and running statistics stay as the first left them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from strata.core.errors import BadInput
from strata.execution.chunks import ChunkedSegment
from strata.execution.kept_outputs import KeptOutputs

aten = torch.ops.aten
# where momentum stands among the arguments
MOMENTUM: dict[Any, int] = {aten.batch_norm.default: 6, aten.instance_norm.default: 6}

T = TypeVar("T")
Code = Callable[..., tuple[Any, ...]]  # the module and the segment's inputs -> its outputs
Surroundings = Callable[[], AbstractContextManager[Any]]  # for the second run


@dataclass(frozen=True)
class Placement:
    """Positions in the ordered list of operations; without cuts nothing is recomputed. The last segment never is."""

    order: tuple[int, ...]  # of the training graph's operations: what needs no gradient comes first
    begin: int  # operations before it run once, and autograd keeps nothing of them...
    cuts: tuple[int, ...]
    random: tuple[bool, ...]  # per recomputed segment, whether it draws random numbers
    recomputed_flops: int  # per sample, on top of an ordinary training step
    chunked: int = 0  # ...and those before this one...
    chunk: int | None = None  # ...so many samples at a time
    cached_flops: int = 0  # per sample, of those, where what they put out may be kept...
    cached_bytes: int | None = None  # ...and its bytes; None: it is not kept
    constants: tuple[int, ...] = ()  # operations whose result, which is handed on, is the same for whatever batch

    @property
    def is_plain(self) -> bool:
        """Whether the network runs as a whole."""
        return not self.cuts and not self.chunked

    def parts(self, operations: Sequence[T]) -> list[tuple[list[T], bool | None]]:
        """The operations of each segment, and whether it draws random numbers; None: it is not recomputed."""
        ordered = [operations[index] for index in self.order]
        bounds = [self.begin, *self.cuts, len(ordered)]
        random: list[bool | None] = [*self.random, None]
        for first in sorted({0, self.chunked} - {self.begin}, reverse=True):
            bounds, random = [first, *bounds], [None, *random]
        return [(ordered[a:b], draws) for a, b, draws in zip(bounds[:-1], bounds[1:], random, strict=True)]


@dataclass(frozen=True)
class Boundary:
    """Names of the values that a segment takes and gives."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gone: tuple[str, ...]  # inputs that nothing after it needs


def boundaries(parts: Sequence[Sequence[tuple[str, Iterable[str]]]], output: str) -> list[Boundary]:
    """Of operations given by name and inputs, weights left out; `output` is the network's result."""
    found: list[Boundary] = []
    needed = {output}  # after the part at hand
    for part in reversed(parts):
        made = {name for name, _ in part}
        inputs = dict.fromkeys(source for _, sources in part for source in sources if source not in made)
        outputs = tuple(name for name, _ in part if name in needed)
        found.append(Boundary(tuple(inputs), outputs, tuple(name for name in inputs if name not in needed)))
        needed |= set(inputs)
    return found[::-1]


@dataclass(frozen=True)
class RunnableSegment:
    boundary: Boundary
    code: Code
    again: Code | None  # None: it runs once
    random: bool
    lets_go: bool = False  # what it is given goes with its last use there: nobody else holds it

    def run(self, module: nn.Module, inputs: Sequence[Any], surroundings: Surroundings) -> tuple[Any, ...]:
        again = self.again
        if self.lets_go:
            return self.code(module, inputs)
        if again is None:
            return self.code(module, *inputs)
        ran = False

        def code(*inputs: Any) -> tuple[Any, ...]:
            nonlocal ran
            chosen, ran = (again if ran else self.code), True
            return chosen(module, *inputs)

        found: tuple[Any, ...] = checkpoint(
            code,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.random,
            context_fn=lambda: (nullcontext(), surroundings()),
        )
        return found


class Segmented:
    """The forward pass of a SubModel in training, in segments. Knows the module's code, not the module."""

    def __init__(self, graph: fx.Graph, placement: Placement) -> None:
        self.constants: frozenset[str] | None = None  # of a frozen part that runs sample by sample; None: there is none
        self.frozen_names: list[str] | None = None  # weights and buffers of a frozen part that runs by itself
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        (self.output,) = (source.name for node in graph.nodes if node.op == "output" for source in node.all_input_nodes)
        parts = placement.parts(nodes)
        named = [[(node.name, [s.name for s in _values(node)]) for node in part] for part, _ in parts]
        by_name = {node.name: node for node in graph.nodes}
        bounds = boundaries(named, self.output)
        self.segments: list[RunnableSegment | ChunkedSegment] = [
            _runnable(part, boundary, by_name, draws, placement.chunked > 0)
            for (part, draws), boundary in zip(parts, bounds, strict=True)
        ]
        if placement.chunked:
            assert placement.chunk is not None
            first = _runnable(parts[0][0], bounds[0], by_name, None)
            chunked = ChunkedSegment(parts[0][0], bounds[0], first.code, placement.chunk)
            self.segments[0], self.frozen_names = chunked, chunked.weights
            if placement.cached_bytes is not None:
                self.constants = frozenset(nodes[index].name for index in placement.constants)

    def __call__(
        self,
        module: nn.Module,
        *batch: Tensor,
        surroundings: Surroundings = nullcontext,
        kept: KeptOutputs | None = None,
    ) -> Tensor:
        """`surroundings` make the second run, within backward, round like the first. `kept`: what the frozen part,
        which comes first, has put out before."""
        values: dict[str, Any] = dict(zip(self.inputs, batch, strict=True))
        for segment in self.segments:
            boundary = segment.boundary
            inputs = [values[name] for name in boundary.inputs]
            for name in boundary.gone:
                del values[name]
            if self.constants is not None and isinstance(segment, ChunkedSegment):
                made = segment.run_by_one(module, inputs, self.constants, kept)
            else:
                made = segment.run(module, inputs, surroundings)
            values |= zip(boundary.outputs, made, strict=True)
            del inputs, made
        result: Tensor = values[self.output]
        return result


def writes(target: Any) -> bool:
    """Whether the operator changes a tensor that it is given."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _values(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def _runnable(
    part: Sequence[fx.Node],
    boundary: Boundary,
    by_name: dict[str, fx.Node],
    random: bool | None,
    lets_go: bool = False,
) -> RunnableSegment:
    inputs = [by_name[name] for name in boundary.inputs]
    outputs = [by_name[name] for name in boundary.outputs]
    again = None if random is None else _code([_still(node) for node in part], inputs, outputs)
    lets_go = lets_go and again is None
    return RunnableSegment(boundary, _code(part, inputs, outputs, lets_go), again, bool(random), lets_go)


def _still(node: fx.Node) -> fx.Node | tuple[fx.Node, tuple[Any, ...]] | None:
    """The operation as the second run has it: buffers stay as they are. None: it only changes a buffer."""
    index = MOMENTUM.get(node.target)
    if index is not None:
        # with momentum 0 the running statistics stay; None in their place would change what autograd keeps
        return node, (*node.args[:index], 0.0, *node.args[index + 1 :])
    changed = node.args[0] if node.args else None
    if not writes(node.target) or not isinstance(changed, fx.Node) or changed.op != "get_attr":
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
    lets_go: bool = False,
) -> Code:
    """Python code for these operations; each value is dropped after its last use. With `lets_go` inputs are too: they
    come in a list, which is emptied."""
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
    text = code.src
    if lets_go and inputs:
        names = ", ".join(made[node].name for node in inputs)
        held = f"def forward(self, held):\n    [{names}] = held; held.clear()\n"
        text = re.sub(r"^def forward\(.*\n", held, text, count=1, flags=re.MULTILINE)
    exec(compile(text, "<strata segment>", "exec"), scope)
    found: Code = scope["forward"]
    return found
