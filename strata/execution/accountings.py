"""What a step of training a cut takes, by either accounting, and its FLOPs; without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.execution.compute import Flops, flops_of_pass
from strata.execution.execution import Execution
from strata.execution.layout import channels_last, submodel_as_trained
from strata.execution.mapped import MappedWeights
from strata.execution.measured import Measured, measure
from strata.execution.norm_statistics import fixed_norms, with_fixed
from strata.execution.paper import activation_bytes, gradient_bytes, weight_bytes
from strata.execution.placement import placement_for, training_forward
from strata.execution.simulated import index_bytes, peak
from strata.execution.traced import trace
from strata.ops.bytes import NoRule

if TYPE_CHECKING:
    from torch import nn

    from strata.execution.segments import Placement
    from strata.graph import ChannelGraph, Cut

ACCOUNTINGS = ("paper", "peak")


@dataclass(frozen=True)
class Memory:
    """Bytes, split into parameters (`peak`: and buffers), their gradients (`peak`: and momentum), and all the rest.

    `mapped`: weights in a file, whose pages are clean and need not stay in memory; they are not in `total`."""

    total: int
    weights: int
    gradients: int
    activations: int
    accounting: str
    mapped: int = 0
    kept: int = 0  # bytes of a sample on the device's disk, of what frozen layers put out


def memory(
    graph: ChannelGraph,
    cut: Cut,
    execution: Execution,
    accounting: str = "peak",
    placed: Callable[[Cut, Execution], Placement | None] | None = None,
) -> Memory:
    """What a step of training `cut` takes by one of the two accountings of docs/method.md.

    `paper` counts the samples that are taken at a time, and of the execution nothing else. `placed`: placement_for of
    this graph, for who remembers what it has found."""
    if accounting not in ACCOUNTINGS:
        raise BadInput(f"accounting is {accounting!r}; it must be one of {', '.join(ACCOUNTINGS)}.")
    if accounting == "paper":
        parts = weight_bytes(cut), gradient_bytes(cut), activation_bytes(graph.sized(cut, execution.at_once))
        return Memory(sum(parts), *parts, accounting)
    waits = not execution.release_gradients
    passes = {(samples, waits and number > 0) for number, samples in enumerate(execution.parts)}
    passes -= {(samples, False) for samples, accumulated in passes if accumulated}  # it takes more than the first
    # the same for all of them
    placement = placement_for(graph, cut, execution) if placed is None else placed(cut, execution)
    found = [_peak(graph, cut, execution, placement, *one) for one in sorted(passes)]
    highest = max(found, key=lambda one: one.total)
    kept = None if placement is None else placement.cached_bytes
    return replace(highest, kept=kept) if kept else highest


def _peak(
    graph: ChannelGraph, cut: Cut, execution: Execution, placement: Placement | None, samples: int, accumulated: bool
) -> Memory:
    """Of the pass over so many samples, with or without gradients of earlier ones."""
    sized = graph.sized(cut, samples)
    ops = with_fixed(sized, fixed_norms(graph, cut, execution))
    mapped = mapped_bytes(graph, cut, execution)
    weights = state_bytes(graph, cut) + index_bytes(ops) - mapped
    if execution.proximal:  # the trained weights as they came
        weights += _bytes(graph, cut, cut.trained)
    used = {op.state_name for op in ops}  # a parameter that takes no part has neither gradient nor momentum
    trained = [_bytes(graph, cut, [name]) for name in cut.trained if name in used]
    alone = with_fixed(graph.sized(cut, 1), fixed_norms(graph, cut, execution)) if execution.caches else ()
    last = channels_last(graph, cut, sized)
    try:
        found = peak(ops, weights, trained, execution, placement, accumulated, graph.inputs, last, alone)
    except NoRule:
        return _traced(graph, cut, execution, weights, sum(trained), mapped)
    return Memory(found.total, found.weights, found.gradients, found.activations, "peak", mapped)


def _traced(graph: ChannelGraph, cut: Cut, execution: Execution, weights: int, trained: int, mapped: int) -> Memory:
    """All passes at once, on fake tensors."""
    kept = _bytes(graph, cut, cut.trained) if execution.proximal else 0
    module, last = submodel_as_trained(graph, cut)
    forward = training_forward(graph, cut, module, execution)
    total = kept - mapped + trace(module, graph.inputs, execution, graph.output_shape, forward, last)
    gradients = trained + execution.slot_bytes(trained)
    return Memory(total, weights, gradients, total - weights - gradients, "peak", mapped)


def built(graph: ChannelGraph, cut: Cut, execution: Execution) -> tuple[nn.Module, bool]:
    """The cut's submodel, with its frozen weights where the execution wants them; and whether channels are last."""
    module, last = submodel_as_trained(graph, cut)
    if execution.maps:
        MappedWeights(module)
    return module, last


def measure_cut(graph: ChannelGraph, cut: Cut, execution: Execution) -> Measured:
    """What a real step of the cut's submodel takes: the truth that `memory` is held against."""
    module, last = built(graph, cut, execution)
    forward = training_forward(graph, cut, module, execution)
    return measure(module, graph.inputs, execution, graph.output_shape, forward, last)


def flops(graph: ChannelGraph, cut: Cut, execution: Execution | None = None) -> Flops:
    """Per sample. With an execution, including what its backward computes anew."""
    found = flops_of_pass(graph, cut)
    placement = None if execution is None else placement_for(graph, cut, execution)
    return found if placement is None else replace(found, recomputed=placement.recomputed_flops)


def _bytes(graph: ChannelGraph, cut: Cut, names: Iterable[str]) -> int:
    return sum(prod(cut.shapes[name]) * graph.state_dtypes[name].itemsize for name in names)


def mapped_bytes(graph: ChannelGraph, cut: Cut, execution: Execution) -> int:
    """Of frozen parameters in a mapped file."""
    parameters = set(graph.parameter_names)
    frozen = (name for name in cut.shapes if name in cut.frozen and name in parameters)
    return _bytes(graph, cut, frozen) if execution.maps else 0


def state_bytes(graph: ChannelGraph, cut: Cut) -> int:
    """Parameters, buffers and constants."""
    state = _bytes(graph, cut, cut.shapes)
    if not graph.constants:
        return state
    table = graph.kept_table(cut)
    constants = (prod(graph.constant_shape(name, table)) * t.element_size() for name, t in graph.constants.items())
    return state + sum(constants)
