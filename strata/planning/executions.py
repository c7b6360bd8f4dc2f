"""How a device may take its steps when bytes are short: the one list that every search of a budget goes through.

A lever is a setting of Execution that saves bytes. Exact ones (the same gradients, up to rounding) go before inexact
ones, and among equals the quickest first. What was asked for stays: only settings that have their default are turned,
and momentum is never switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.ops.channels import name_of

if TYPE_CHECKING:
    from strata.execution.execution import Execution
    from strata.graph import ChannelGraph

FEWEST_NORMED = 4  # samples: batch norm over 1 to 3 does not learn
RECOMPUTED = 1 / 3  # of a step's time, for most of a second forward pass

CHUNK = 4  # samples at a time through frozen layers
# Settings beside the micro-batch, each with its values, the last one the leanest. All are exact. Momentum in bfloat16
# and mapped weights are left to the user: the one rounds, the other needs a file on the device.
_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": (None, "auto"),
    "release_gradients": (False, True),
    "frozen_chunk": (None, CHUNK),
}
LEVERS = ("micro_batch", *_VALUES)


def is_normed(graph: ChannelGraph) -> bool:
    """Whether what is taken at a time meets in a batch norm: of fixed statistics too, until they are fixed."""
    return any(op.kind == "op" and name_of(op.target) == "batch_norm" for op in graph.sized(graph.full(), 2))


def candidates(graph: ChannelGraph, execution: Execution, norm_samples: int | None = None) -> tuple[Execution, ...]:
    """All ways to take a step of this execution, the cheapest first: `execution` itself, then leaner ones, of which
    none has batch norm see fewer than `norm_samples` at a time."""
    normed = is_normed(graph)
    fewest = FEWEST_NORMED if norm_samples is None else norm_samples
    found = [one for one in _turned(execution) if not normed or _sound(one, execution, fewest)]
    return tuple(sorted(found, key=lambda one: (_inexactness(one, normed), _time(one))))


def leaner(one: Execution, other: Execution) -> bool:
    """Whether no cut needs more bytes by `one` than by `other`: each lever is turned at least as far."""
    if one.micro_batch != other.micro_batch:
        if one.micro_batch is None or one.micro_batch > (other.micro_batch or other.batch_size):
            return False
        if other.micro_batch is None and not one.release_gradients:  # gradients wait for those of the other parts
            return False
    return all(
        values.index(getattr(one, name)) >= values.index(getattr(other, name)) or getattr(other, name) not in values
        for name, values in _VALUES.items()
        if getattr(one, name) in values
    )


def _turned(execution: Execution) -> Iterator[Execution]:
    sizes: list[int | None] = [execution.micro_batch]
    while (half := -(-(sizes[-1] or execution.batch_size) // 2)) < (sizes[-1] or execution.batch_size):
        sizes.append(half)
    names = [name for name, values in _VALUES.items() if getattr(execution, name) == values[0]]
    for size, *turned in product(sizes, *(_VALUES[name] for name in names)):
        try:
            yield replace(execution, micro_batch=size, **dict(zip(names, turned, strict=True)))
        except BadInput:  # these two levers do not go together
            continue


def _sound(one: Execution, asked: Execution, fewest: int) -> bool:
    """Whether batch norm sees enough samples at a time; what was asked for is the user's own affair."""
    return one.micro_batch == asked.micro_batch or min(one.parts) >= fewest


def _inexactness(one: Execution, normed: bool) -> float:
    """How far a step is from that of the whole batch: 0 is the same step, up to rounding."""
    return one.batch_size / one.at_once - 1 if normed else 0.0


def _time(one: Execution) -> float:
    """Of a step, about: passes over few samples fill a machine badly."""
    again = RECOMPUTED if one.activation_checkpointing is not None else 0.0
    overhead = 0.02 * one.release_gradients + (0.05 if one.frozen_chunk is not None else 0.0)
    return (1 + again + overhead) * (1 + 1 / one.at_once)
