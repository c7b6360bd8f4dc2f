"""Bytes, FLOPs and traffic of a cut, without training; and what a real training step takes, to check them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.execution.flops import Flops, Traffic, flops, traffic
from strata.execution.measured import Measured, backward, measure, measure_step
from strata.execution.paper import activation_bytes, gradient_bytes, weight_bytes
from strata.execution.simulated import index_bytes, peak
from strata.execution.traced import trace
from strata.ops.bytes import NoRule

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

ACCOUNTINGS = ("paper", "peak")

__all__ = [
    "ACCOUNTINGS",
    "Flops",
    "Measured",
    "Memory",
    "Traffic",
    "backward",
    "flops",
    "measure",
    "measure_step",
    "memory",
    "state_bytes",
    "trace",
    "traffic",
]


@dataclass(frozen=True)
class Memory:
    """Bytes, split into parameters (`peak`: and buffers), their gradients (`peak`: and momentum), and all the rest."""

    total: int
    weights: int
    gradients: int
    activations: int
    accounting: str


def memory(
    graph: ChannelGraph,
    cut: Cut,
    batch_size: int,
    accounting: str = "peak",
    momentum: bool = True,
    micro_batch: int | None = None,
    proximal: bool = False,
) -> Memory:
    """What training `cut` takes by one of the two accountings of METHOD.md.

    `micro_batch`: samples at a time, gradients summed over the batch; by `peak` then what it takes at the most.
    `momentum` and `proximal` (FedProx keeps the trained weights as they came) concern `peak` only."""
    if accounting not in ACCOUNTINGS:
        raise BadInput(f"accounting is {accounting!r}; it must be one of {', '.join(ACCOUNTINGS)}.")
    if batch_size < 1:
        raise BadInput(f"the batch size is {batch_size}; it must be at least 1.")
    if micro_batch is not None and not 1 <= micro_batch <= batch_size:
        raise BadInput(f"the micro-batch must be within 1 and the batch size of {batch_size}, not {micro_batch}")
    if proximal:
        plain = memory(graph, cut, batch_size, accounting, momentum, micro_batch)
        kept = 0 if accounting == "paper" else _trained_bytes(graph, cut)
        return replace(plain, total=plain.total + kept, weights=plain.weights + kept)
    if micro_batch is not None and micro_batch < batch_size:
        part = memory(graph, cut, micro_batch, accounting, momentum)
        return part if accounting == "paper" else _in_parts(part, graph, cut, batch_size - micro_batch)
    if accounting == "paper":
        parts = weight_bytes(cut), gradient_bytes(cut), activation_bytes(graph.sized(cut, batch_size))
        return Memory(sum(parts), *parts, accounting)
    ops = graph.sized(cut, batch_size)
    weights = state_bytes(graph, cut) + index_bytes(ops)
    used = {op.state_name for op in ops}  # a parameter that takes no part has neither gradient nor momentum
    trained = [prod(cut.shapes[name]) * graph.state_dtypes[name].itemsize for name in cut.trained if name in used]
    try:
        found = peak(ops, weights, trained, momentum)
    except NoRule:
        total = trace(graph.submodel(cut), graph.inputs, batch_size, graph.classes, momentum)
        gradients = sum(trained) * (2 if momentum else 1)
        return Memory(total, weights, gradients, total - weights - gradients, accounting)
    return Memory(found.total, found.weights, found.gradients, found.activations, accounting)


def _in_parts(part: Memory, graph: ChannelGraph, cut: Cut, others: int) -> Memory:
    """A part of a batch, beside the gradients of the parts before it and the samples that wait: `others`."""
    gradients = _trained_bytes(graph, cut)
    samples = others * (graph.inputs.sample_bytes + 8)  # and a label
    return replace(
        part, total=part.total + gradients + samples, gradients=part.gradients + gradients,
        activations=part.activations + samples,
    )  # fmt: skip


def _trained_bytes(graph: ChannelGraph, cut: Cut) -> int:
    return sum(prod(cut.shapes[name]) * graph.state_dtypes[name].itemsize for name in cut.trained)


def state_bytes(graph: ChannelGraph, cut: Cut) -> int:
    """Parameters, buffers and constants."""
    state = sum(prod(shape) * graph.state_dtypes[name].itemsize for name, shape in cut.shapes.items())
    if not graph.constants:
        return state
    table = graph.kept_table(cut)
    constants = (prod(graph.constant_shape(name, table)) * t.element_size() for name, t in graph.constants.items())
    return state + sum(constants)
