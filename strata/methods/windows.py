"""Windows: stretches of layers, trained at full width while the rest of the model stays as it is.

What several methods share that keep what is pretrained: which layers a device of so many bytes can train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from strata.core.errors import BadInput, TooLittle
from strata.core.sizes import show_bytes, show_exactly
from strata.methods.base import Method

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut
    from strata.methods.budget import Budget


def lowest(top: int, fits: Callable[[int], bool]) -> int:
    """The least number from 0 on that fits; those above it do too. `top` is not asked. To count bytes takes long."""
    if top and fits(0):
        return 0
    bottom = min(1, top)
    while bottom < top:
        middle = (bottom + top) // 2
        bottom, top = (bottom, middle) if fits(middle) else (middle + 1, top)
    return top


def fewest_frozen(
    name: str, graph: ChannelGraph, budget: Budget, size: int, above: Callable[[int], int] | None = None
) -> int:
    """The fewest layers to freeze so that those from there on fit, up to `above` of it; None: all of them."""
    depth = graph.depth
    found = lowest(depth, lambda k: budget.fits(graph, graph.window(k, above(k) if above else depth), size))
    least = graph.window(depth, depth)
    if found < depth or budget.fits(graph, least, size):
        return found
    need = budget.need(graph, least)
    raise TooLittle(
        f"{name} needs {show_exactly(need)} for the classifier alone, {show_bytes(need - size)} more than the budget "
        f"of {show_bytes(size)}",
        need,
        "the classifier alone",
    )


@dataclass(frozen=True)
class Windows(Method):
    """In each step a window of layers is trained, and the classifier. `bounds` has (k_frozen, k_trained) of every step,
    and that for every level of devices; a step begins at the same layer for all."""

    needs_budget = True
    bounds: tuple[tuple[tuple[int, int], ...], ...] = ()  # empty: one layer after another

    def __post_init__(self) -> None:
        bounds = self.bounds or (tuple((k, k + 1) for k in range(self.graph.depth)),)
        object.__setattr__(self, "bounds", tuple(tuple((int(a), int(b)) for a, b in level) for level in bounds))
        if any([a for a, _ in level] != [a for a, _ in self.bounds[0]] for level in self.bounds):
            raise BadInput(f"the windows of {self.name} begin at other layers for some devices than for others")

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        """As wide as fits at each place. The weakest devices say where windows begin; those of others reach higher."""
        sizes = budget.limits(graph)
        if not sizes:
            return cls.made(graph, budget.seed, (1.0,), cls.timing(budget))
        starts = [low for low, _ in _windows(cls.name, graph, budget, min(sizes))]

        def reach(size: int) -> tuple[tuple[int, int], ...]:
            return tuple((low, _reach(graph, budget, size, low)) for low in starts)

        found = {size: reach(size) for size in set(sizes)}
        return cls.made(graph, budget.seed, (1.0,), {**cls.timing(budget), "bounds": tuple(found[s] for s in sizes)})

    @classmethod
    def timing(cls, budget: Budget) -> dict[str, int]:
        """Further fields of the method, of what the run says."""
        return {}

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Of the weakest devices."""
        return min(self.bounds, key=lambda level: sum(high for _, high in level))

    @property
    def setting(self) -> str:
        widths = [high - low for low, high in self.windows]
        few, many = min(widths), max(widths)
        if not many:
            return "the classifier alone"
        wide = f"{few}" if few == many else f"{few} to {many}"
        return f"{len(widths)} {'window' if len(widths) == 1 else 'windows'} of {wide} layer{'s' if many != 1 else ''}"

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        return [max(count(self.graph.window(*window)) for window in level) for level in self.bounds]

    def most_executed(self, count: Callable[[Cut, Execution | None], int]) -> list[int]:
        windows = [self.graph.window(*window) for level in self.bounds for window in level]
        sizes = [count(*one) for one in zip(windows, self.executions or (None,) * len(windows), strict=True)]
        each = len(self.bounds[0])
        return [max(sizes[first : first + each]) for first in range(0, len(sizes), each)]

    def executed(self, budget: Budget) -> Self:
        """Each window in its own way: those below have more activations, those above may have more parameters."""
        if not budget.lean:
            return self
        chooser = budget.chooser(self.graph)

        def cheapest(window: tuple[int, int], size: int) -> Execution | None:
            found = chooser.fitting(self.graph.window(*window), size)
            return None if found is None or found == budget.execution else found.alone

        levels = zip(self.bounds, budget.sizes, strict=True)
        found = tuple(cheapest(window, size) for level, size in levels for window in level)
        return replace(self, executions=found if any(found) else ())

    def execution_for(self, round: int, device: int) -> Execution | None:
        """`executions` has one of every window, level after level."""
        if not self.executions:
            return None
        level = device % len(self.bounds)
        return self.executions[level * len(self.bounds[0]) + self.step(round)]

    @property
    def period(self) -> int | None:
        return len(self.bounds)

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.window(*self.bounds[device % len(self.bounds)][self.step(round)])


def _windows(name: str, graph: ChannelGraph, budget: Budget, size: int) -> list[tuple[int, int]]:
    """From the lowest layer that can be trained upwards, each as wide as fits. A layer that does not fit even alone,
    for its parameters, is passed over."""
    depth = graph.depth
    low = fewest_frozen(name, graph, budget, size, lambda k: k + 1)
    found = []
    while low < depth:
        high = _reach(graph, budget, size, low)
        if high > low:
            found.append((low, high))
        low = max(high, low + 1)
    return found or [(depth, depth)]


def _reach(graph: ChannelGraph, budget: Budget, size: int, low: int) -> int:
    """The highest layer that a window from `low` on may have; `low` itself where not one fits."""
    depth = graph.depth
    return depth - lowest(depth - low, lambda less: budget.fits(graph, graph.window(low, depth - less), size))
