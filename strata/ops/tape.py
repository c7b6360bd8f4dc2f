"""A model of PyTorch's eager execution that knows sizes only: storages with reference counts, and autograd's graph.

What it relies on (torch 2.x, CPU):
- a storage lives as long as a Python variable, a saved tensor or a gradient on its way refers to it;
- backward runs the nodes in the opposite order of their creation: the engine takes the ready node with the highest
  sequence number, and everything that consumes a node's output was created after it;
- a node's incoming gradient and saved tensors go when it has run, before its results are handed on;
- where gradients meet, the first one is added to in place if nothing else refers to it, it is dense and no view (a
  view keeps its base), otherwise a third tensor is made;
- a parameter gets its gradient when all the places that use it have given theirs, and takes it over, unless it is laid
  out otherwise or shared: then it is copied; where it has one already (of an earlier part of the batch), the new one is
  added to it and goes; where gradients are released, its step is taken then and there, and the gradient goes.

A segment (torch.utils.checkpoint, not re-entrant) keeps its inputs, and its nodes keep nothing. When backward comes to
the first of them that needs something, the segment runs again, up to the last value that is kept; what it keeps now is
held until the node that it belongs to has run, and the inputs until the last such node has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import prod

Shape = tuple[int, ...]
Strides = tuple[int, ...] | None
STANDING = 0  # the storage of all that is there all the time: already counted


class Value:
    """A tensor: sizes, strides (None: contiguous) and the storage behind it; `uses` counts who holds it."""

    __slots__ = (
        "itemsize",
        "node",
        "parameter",
        "port",
        "requires_grad",
        "shape",
        "storage",
        "strides",
        "uses",
        "whole",
    )

    def __init__(self, storage: int, shape: Shape, itemsize: int = 4, strides: Strides = None) -> None:
        self.storage = storage
        self.shape = shape
        self.itemsize = itemsize
        self.strides = strides
        self.requires_grad = False
        self.parameter = False
        self.node: Node | None = None
        self.port = 0
        self.uses = 1
        self.whole = True  # not a view of another tensor

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


# From the gradients of a node's outputs (None: undefined) to those of its inputs, allocating as it goes. A rule that
# drops an incoming gradient early replaces it by None.
Gradients = list[Value | None]
Backward = Callable[["Simulation", Gradients], Gradients]


class Node:
    __slots__ = ("backward", "buffer", "inputs", "saved", "segment")

    def __init__(self, inputs: Sequence[Value | None], saved: list[int], backward: Backward, outputs: int) -> None:
        self.inputs = inputs
        self.saved = saved
        self.backward = backward
        self.buffer: Gradients = [None] * outputs
        self.segment: Segment | None = None  # that it has to ask for what it saved


class Segment:
    """A part of the forward pass that backward computes anew: it keeps its inputs and nothing within."""

    def __init__(self, kept: list[int], again: Callable[[], None]) -> None:
        self.kept = kept  # storages that it holds a reference to
        self.again = again  # runs it a second time
        self.nodes: list[Node] = []
        self.waiting = 0  # nodes that will ask for something
        self.newest = 0  # storage among those of the last of them
        self.has_run_again = False


class Simulation:
    """Live bytes and their highest value so far. Standing bytes (weights, momentum, the batch) are the start; of these,
    `gradients` are of parameters, from earlier parts of the batch: then those to come are added to them."""

    def __init__(self, standing: int, gradients: int = 0) -> None:
        self.live = self.peak = standing + gradients
        self.accumulates = gradients > 0
        self.parameter_gradients = gradients  # live bytes that are gradients of parameters...
        self.gradients_at_peak = gradients  # ...and how many they were at the peak
        self.segment: Segment | None = None  # that runs, for the first time
        self.sizes = [0]
        self.references = [1]
        self.nodes: list[Node] = []
        self.viewed: set[int] = set()  # storages of which autograd knows a view
        self.step: Callable[[int], int] | None = None  # where gradients are released: bytes that a step takes beside
        self.given: dict[int, Gradients] = {}  # per parameter's storage, what arrived so far...
        self.awaited: Counter[int] = Counter()  # ...and how many uses of it are still to give theirs

    # storages

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self.references.append(1)
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
            self.gradients_at_peak = self.parameter_gradients
        return len(self.sizes) - 1

    def release(self, storage: int) -> None:
        self.references[storage] -= 1
        if not self.references[storage]:
            self.live -= self.sizes[storage]

    def passing(self, size: int) -> None:
        """A temporary inside an operator."""
        if self.live + size > self.peak:
            self.peak = self.live + size
            self.gradients_at_peak = self.parameter_gradients

    # tensors

    def new(self, shape: Shape, itemsize: int = 4, strides: Strides = None) -> Value:
        return Value(self.allocate(prod(shape) * itemsize), shape, itemsize, strides)

    def view(self, value: Value, shape: Shape, strides: Strides) -> Value:
        self.references[value.storage] += 1
        result = Value(value.storage, shape, value.itemsize, strides)
        result.whole = False
        return result

    def drop(self, value: Value) -> None:
        value.uses -= 1
        if not value.uses:
            self.release(value.storage)

    def contiguous(self, value: Value) -> Value:
        """As `.contiguous()`: a new reference to the same tensor, or a copy."""
        if value.strides is None or value.strides == contiguous_strides(value.shape):
            return self.view(value, value.shape, None)
        return self.new(value.shape, value.itemsize)

    def reshape(self, value: Value, shape: Shape) -> Value:
        """As `.reshape()`: a view where the strides allow one, otherwise a copy."""
        strides = view_strides(value.shape, value.strides, shape) if value.strides is not None else None
        if value.strides is not None and strides is None:
            return self.new(shape, value.itemsize)
        return self.view(value, shape, strides)

    def sum_to(self, value: Value, shape: Shape) -> Value:
        """As `sum_to_size`; takes over `value`."""
        if value.shape == shape:
            return value
        if prod(value.shape) == prod(shape):
            result = self.reshape(value, shape)
        else:
            result = self.new(shape, value.itemsize)
        self.drop(value)
        return result

    # autograd

    def record(
        self,
        inputs: Sequence[Value | None],
        outputs: Value | Sequence[Value],
        saved: Sequence[Value],
        backward: Backward,
        extra: Sequence[int] = (),
    ) -> bool:
        """Put an operator on the tape if one of its inputs requires a gradient.

        `saved` tensors are kept till its backward has run; `extra` are storages made to be saved (statistics, masks),
        which are released at once where nothing is recorded.
        """
        if not any(value is not None and value.requires_grad for value in inputs):
            for storage in extra:
                self.release(storage)
            return False
        results = (outputs,) if isinstance(outputs, Value) else outputs
        kept = [value.storage for value in saved]
        for storage in kept:
            self.references[storage] += 1
        # Edges are what the inputs are now: an in-place operator may give a value another node later.
        node = Node([_edge(value) for value in inputs], [*kept, *extra], backward, len(results))
        self.nodes.append(node)
        if self.segment is not None:
            self._leave_out(node, self.segment)
        for port, value in enumerate(results):
            value.requires_grad = True
            value.node = node
            value.port = port
            value.parameter = False
        return True

    def run_backward(self, loss: Value) -> None:
        """All of backward; the loss and its gradient go at the end."""
        if loss.node is None:
            return
        edges = [edge for node in self.nodes for edge in node.inputs if edge is not None]
        self.awaited = Counter(edge.storage for edge in edges if edge.parameter)
        seed = self.new(loss.shape, loss.itemsize)
        seed.uses += 1  # held by the caller
        loss.node.buffer[loss.port] = seed
        while self.nodes:
            node = self.nodes.pop()
            incoming = node.buffer
            if any(gradient is not None for gradient in incoming):
                if node.segment is not None and not node.segment.has_run_again:
                    self._run_again(node.segment)
                results = node.backward(self, incoming)
                results = [self._validated(edge, result) for edge, result in zip(node.inputs, results, strict=True)]
            else:
                results = []
            for gradient in incoming:
                if gradient is not None:
                    self.drop(gradient)
            for storage in node.saved:
                self.release(storage)
            if node.segment is not None:
                node.segment.waiting -= 1
                self.end(node.segment)
            for edge, result in zip_longest(node.inputs, results):
                if edge is not None and edge.parameter:
                    self._give(edge, result)
                elif edge is not None and result is not None:
                    assert edge.node is not None
                    self._meet(edge.node.buffer, edge.port, result)
        self.drop(seed)
        self.drop(loss)

    # segments

    def end(self, segment: Segment) -> None:
        """Its inputs go with the last node that may ask for something."""
        if not segment.waiting:
            for storage in segment.kept:
                self.release(storage)
            segment.kept = []

    def _leave_out(self, node: Node, segment: Segment) -> None:
        segment.nodes.append(node)
        if node.saved:
            segment.waiting += 1
            segment.newest = max(node.saved)
            node.segment = segment
        for storage in node.saved:
            self.release(storage)
        node.saved = []

    def _run_again(self, segment: Segment) -> None:
        segment.has_run_again = True
        tape, self.nodes = self.nodes, []
        segment.again()
        anew, self.nodes = self.nodes, tape
        # the same operators in the same order make the same nodes; those after the last kept value are missing
        for node, other in zip(segment.nodes, anew, strict=False):
            node.saved, node.backward = other.saved, other.backward

    def _validated(self, edge: Value | None, gradient: Value | None) -> Value | None:
        """Gradients of broadcast inputs are reduced while the node still holds everything."""
        if edge is None or gradient is None or gradient.shape == edge.shape:
            return gradient
        return self.sum_to(gradient, edge.shape)

    def _give(self, parameter: Value, gradient: Value | None) -> None:
        buffer = self.given.setdefault(parameter.storage, [None])
        if gradient is not None:
            self._meet(buffer, 0, gradient)
        self.awaited[parameter.storage] -= 1
        whole = buffer[0]
        if self.awaited[parameter.storage] or whole is None:
            return
        if self.accumulates:
            self.drop(whole)
            return
        if whole.uses > 1 or not same_layout(whole.shape, whole.strides, parameter.strides):
            copy = self.new(parameter.shape, parameter.itemsize, parameter.strides)
            self.drop(whole)
            whole = copy
        size = self.sizes[whole.storage]
        self.parameter_gradients += size
        if self.step is not None:
            self.passing(self.step(size))
            self.parameter_gradients -= size
            self.drop(whole)

    def _meet(self, buffer: Gradients, port: int, gradient: Value) -> None:
        first = buffer[port]
        if first is None:
            buffer[port] = gradient
            return
        alone = first.whole and first.uses == 1 and self.references[first.storage] == 1
        if not (alone and is_dense(first.shape, first.strides)):
            buffer[port] = self.new(first.shape, first.itemsize, elementwise_strides(first, gradient))
            self.drop(first)
        self.drop(gradient)


def _edge(value: Value | None) -> Value | None:
    if value is None or not value.requires_grad:
        return None
    edge = Value(value.storage, value.shape, value.itemsize, value.strides)
    edge.requires_grad, edge.parameter, edge.node, edge.port = True, value.parameter, value.node, value.port
    return edge


# layouts


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Shape) -> tuple[int, ...]:
    batch, channels, height, width = shape
    return (height * width * channels, 1, width * channels, channels)


def is_channels_last(shape: Shape, strides: Strides) -> bool:
    """torch's `suggest_memory_format() == channels_last`; ambiguous layouts count as contiguous."""
    if strides is None or len(shape) != 4 or strides[1] == 0:
        return False
    lowest = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < lowest or (dim == 0 and lowest == strides[1]):
            return False
        lowest = strides[dim] * max(shape[dim], 1)
    return True


def lie_alike(a: Value, b: Value) -> bool:
    """Both with channels last, or neither: kernels copy one of two that do not."""
    return is_channels_last(a.shape, a.strides) == is_channels_last(b.shape, b.strides)


def is_dense(shape: Shape, strides: Strides) -> bool:
    """Non-overlapping and without gaps, in whatever order of dims."""
    if strides is None:
        return True
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def same_layout(shape: Shape, a: Strides, b: Strides) -> bool:
    if a == b:
        return True
    first = a or contiguous_strides(shape)
    second = b or contiguous_strides(shape)
    return all(size == 1 or p == q for size, p, q in zip(shape, first, second, strict=True))


def view_strides(shape: Shape, strides: tuple[int, ...], target: Shape) -> Strides:
    """Strides that make a view of `target` shape, or None if there are none (as torch's computeStride)."""
    if not prod(shape):
        return contiguous_strides(target)
    result = [0] * len(target)
    view_dim = len(target) - 1
    chunk_stride = strides[-1] if strides else 1
    elements = viewed = 1
    for dim in range(len(shape) - 1, -1, -1):
        elements *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != elements * chunk_stride):
            while view_dim >= 0 and (viewed < elements or target[view_dim] == 1):
                result[view_dim] = viewed * chunk_stride
                viewed *= target[view_dim]
                view_dim -= 1
            if viewed != elements:
                return None
            if dim > 0:
                chunk_stride = strides[dim - 1]
                elements = viewed = 1
    return tuple(result) if view_dim == -1 else None


def elementwise_strides(*operands: Value) -> Strides:
    """Layout of an elementwise result: that of the first operand of full size which is not plainly contiguous."""
    if all(operand.strides is None for operand in operands):
        return None
    size = max(prod(operand.shape) for operand in operands)
    full = [operand for operand in operands if prod(operand.shape) == size]
    first = next((operand for operand in full if is_dense(operand.shape, operand.strides)), full[0])
    if first.strides is None or is_dense(first.shape, first.strides):
        return first.strides
    # gaps or broadcast dims: dense, in the same order of dims
    result = [0] * len(first.shape)
    step = 1
    for dim in sorted(range(len(first.shape)), key=lambda d: (first.strides[d], -d)):  # type: ignore[index]
        result[dim] = step
        step *= first.shape[dim]
    return tuple(result)
