"""Where each value of a program lies in its arena: first fit in several orders, the best kept; element-wise results in
the place of an operand that nobody needs any more.

ExecuTorch's own planner leaves gaps of 5 to 24 % and puts no result in an operand's place; torch's allocator, which the
plan's `peak` counts by, does neither badly.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

ENOUGH = 1.002  # of what has to be live at one time at the least
WORK = 4_000_000  # placements looked at, at the most: it bounds the time for large networks

# out variants, and which arguments their first result may lie on: each element is read before it is written, and
# nothing after. Kernels of our own say so in native/kernels.cpp; torch's element-wise ones do where no size differs
IN_PLACE = {
    "strata::relu.out": (0,),
    "strata::relu_backward.out": (0,),
    "strata::clamp.out": (0,),
    "strata::clamp_backward.out": (0,),
    "strata::batch_norm.out": (0,),
    "strata::batch_norm_statistics.out": (0,),
    "strata::batch_norm_backward.out": (0,),
    "strata::normalise.out": (0,),
    "strata::normalise_backward.out": (0,),
    "strata::gelu.out": (0,),
    "strata::gelu_backward.out": (0,),
    "strata::silu.out": (0,),
    "strata::silu_backward.out": (0,),
    "strata::softmax.out": (0,),
    "strata::softmax_backward.out": (0,),
    "strata::layer_norm.out": (0,),
    "strata::layer_norm_backward.out": (0,),
    "strata::attention_backward.out": (0, 1),  # row by row, as dy and the queries are read
    "aten::add.out": (0, 1),
    "aten::sub.out": (0, 1),
    "aten::mul.out": (0, 1),
    "aten::mul.Scalar_out": (0,),
    "aten::div.out": (0,),
    "aten::sigmoid.out": (0,),
}


@dataclass(frozen=True)
class Item:
    """Bytes that are live from the instruction `start` to `end`, both included."""

    start: int
    end: int
    size: int


def lower_bound(items: Sequence[Item]) -> int:
    """The most bytes that are live at one time."""
    changes: dict[int, int] = {}
    for item in items:
        changes[item.start] = changes.get(item.start, 0) + item.size
        changes[item.end + 1] = changes.get(item.end + 1, 0) - item.size
    live = most = 0
    for time in sorted(changes):
        live += changes[time]
        most = max(most, live)
    return most


def first_fit(items: Sequence[Item], order: Iterable[int]) -> tuple[int, list[int]]:
    """The bytes taken, and each item's offset: the lowest gap that holds it, in this order."""
    placed: list[tuple[int, int, int, int]] = []  # offset, its end, from, to
    offsets, top = [0] * len(items), 0
    for index in order:
        item, at = items[index], 0
        for offset, end, start, last in placed:
            if start > item.end or last < item.start:
                continue
            if offset - at >= item.size:
                break
            at = max(at, end)
        offsets[index] = at
        insort(placed, (at, at + item.size, item.start, item.end))
        top = max(top, at + item.size)
    return top, offsets


def pack(items: Sequence[Item], seed: int = 0) -> tuple[int, list[int]]:
    """The bytes taken, and each item's offset. The same for the same items."""
    numbers, least = range(len(items)), lower_bound(items)
    keys: list[Callable[[int], Any]] = [
        lambda i: (-items[i].size, items[i].start),
        lambda i: (-items[i].size, -items[i].start),
        lambda i: (items[i].start - items[i].end, -items[i].size),
        lambda i: (items[i].start, -items[i].size),
        lambda i: (-items[i].end, -items[i].size),
        lambda i: -items[i].size * (items[i].end - items[i].start + 1),
    ]
    best: tuple[int, list[int], list[int]] | None = None
    for key in keys:
        order = sorted(numbers, key=key)
        top, offsets = first_fit(items, order)
        if best is None or top < best[0]:
            best = (top, offsets, order)
        if best[0] <= least * ENOUGH:
            break
    assert best is not None
    draw = random.Random(seed)
    large = [i for i in numbers if items[i].size > least // 200] or list(numbers)
    for _ in range(WORK // max(1, len(items) ** 2)):
        if best[0] <= least * ENOUGH:
            break
        order = list(best[2])
        for _ in range(draw.choice((1, 1, 2, 4))):
            moved = draw.choice(large)
            order.remove(moved)
            order.insert(draw.randrange(1 + len(order) // draw.choice((1, 4))), moved)
        top, offsets = first_fit(items, order)
        if top <= best[0]:
            best = (top, offsets, order)
    return best[0], best[1]


def planning_pass() -> Any:
    """For ExecuTorch. Inputs of a program are the caller's memory."""
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, greedy
    from executorch.exir.passes import MemoryPlanningPass

    suite = MemoryPlanningAlgorithmSuite([greedy, _packed])
    return MemoryPlanningPass(memory_planning_algo=suite, alloc_graph_input=False)


def _packed(alignment: int, specs: Any, graph_module: fx.GraphModule, signature: Any, extra_padding: int = 0) -> Any:
    from executorch.exir.memory_planning import MemoryAlgoResult, SpecAllocResult, greedy

    ordered = sorted(specs, key=lambda spec: (spec.lifetime[0], spec.lifetime[1], spec.allocated_memory))
    if not ordered or any(spec.storage_base is not None for spec in ordered):
        return greedy(alignment, specs, graph_module, signature, extra_padding)
    for spec in ordered:
        spec.realign(alignment)
    groups = _Groups(ordered)
    groups.merge(graph_module.graph)
    roots = [spec for spec in ordered if groups.root(spec) is spec]
    top, offsets = pack([Item(*groups.lives[id(spec)], spec.allocated_memory) for spec in roots])
    places = {id(spec): offset for spec, offset in zip(roots, offsets, strict=True)}
    result = MemoryAlgoResult({}, [0, top + extra_padding])
    for number, spec in enumerate(ordered):
        result.spec_dict[spec] = SpecAllocResult(1, number, places[id(groups.root(spec))])
    return result


class _Groups:
    """Values that share one place, and when it is in use."""

    def __init__(self, specs: Sequence[Any]) -> None:
        self.parents = {id(spec): spec for spec in specs}
        self.lives: dict[int, tuple[int, int]] = {id(spec): tuple(spec.lifetime) for spec in specs}

    def root(self, spec: Any) -> Any:
        while self.parents[id(spec)] is not spec:
            spec = self.parents[id(spec)]
        return spec

    def merge(self, graph: fx.Graph) -> None:
        for number, node in enumerate(graph.nodes):
            name = node.target.name() if node.op == "call_function" and hasattr(node.target, "_schema") else ""
            result = self._known(next(iter(node.kwargs.values()), None)) if name in IN_PLACE else None
            for position in IN_PLACE.get(name, ()) if result is not None else ():
                operand = self._known(node.args[position])
                if operand is not None and self._fits(operand, result, number):
                    self._join(operand, result)
                    break

    def _known(self, argument: Any) -> Any:
        """The value of a node, where it has a place of its own."""
        spec = getattr(argument, "meta", {}).get("spec")
        return spec if id(spec) in self.parents else None

    def _fits(self, operand: Any, result: Any, number: int) -> bool:
        first, second = self.root(operand), self.root(result)
        same = list(operand.shape) == list(result.shape) and operand.dtype == result.dtype
        # the result's life begins where its room is made, right before the instruction: nothing else comes between
        begins = number - 8 <= self.lives[id(second)][0] <= number
        return first is not second and same and self.lives[id(first)][1] <= number and begins

    def _join(self, operand: Any, result: Any) -> None:
        first, second = self.root(operand), self.root(result)
        lives = self.lives[id(first)], self.lives[id(second)]
        self.parents[id(second)] = first
        self.lives[id(first)] = (min(life[0] for life in lives), max(life[1] for life in lives))
