"""What one real training step allocates: the truth that the closed form (`peak.py`) is held against.

Source: the CPU allocator's own events, as the torch profiler records them, so nothing that a tensor allocates escapes,
temporaries inside operators included. A TorchDispatchMode that follows storages would be simpler, but it changes what
it watches: while a dispatch mode is active autograd sums gradients at forks out of place, which it does not do
otherwise.

oneDNN takes scratch from the same allocator (weights and images reordered to its blocked layouts; for a depthwise 7x7
convolution on small images more than the network itself), as much as its kernels for this processor like to have.
That is no property of the model, so it is kept apart: what a convolution (or an LSTM) has allocated and freed again by
the time it returns is `scratch`; `peak` counts tensors.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional

from strata.execution.execution import Execution
from strata.execution.mapped import is_mapped
from strata.execution.optimizers import Optimizer, Releasing, new_optimizer, new_releasing
from strata.graph.inputs import InputsLike, InputSpec, float_dtype, images_last

Forward = Callable[..., Tensor]  # a module and its inputs -> its output

# What oneDNN runs; torch's own ("slow") convolutions among these keep their column buffers in the count.
_LIBRARY = frozenset(
    {"aten::_convolution", "aten::convolution_backward", "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
)
_NATIVE = ("aten::thnn_conv", "aten::_slow_conv", "aten::slow_conv")


@dataclass(frozen=True)
class Measured:
    peak: int  # highest live tensor bytes of a step: weights, buffers, momentum, inputs, activations, gradients
    scratch: int  # what oneDNN needs on top at the highest moment: allocated - peak
    allocated: int  # highest bytes the allocator had handed out, scratch included
    standing: int  # of these, what lives all the time: weights, buffers, momentum, inputs

    @classmethod
    def of(cls, growth: Growth, standing: int) -> Measured:
        peak, allocated = standing + growth.tensors, standing + growth.allocated
        return cls(peak, allocated - peak, allocated, standing)


@dataclass(frozen=True)
class Growth:
    """How far live bytes rose above those at the start."""

    tensors: int
    allocated: int


def measure(
    module: nn.Module,
    input_shape: InputsLike,
    execution: Execution,
    classes: int | Sequence[int],
    forward: Forward | None = None,
    channels_last: bool = False,
) -> Measured:
    """Train `module` (parameters without requires_grad are frozen) and measure a steady-state step.

    `classes`: how many there are, or the shape of what it returns for a sample.
    `forward` runs it where it does not run as a whole (placement.training_forward). The learning rate is 0, buffers
    are restored and the global random generator too: `module` is left as it was.
    """
    batch = example_batch(InputSpec.of(input_shape, module), execution, channels_last)
    labels = example_labels(classes, execution.batch_size)
    optimizer, step = training_step(module, batch, labels, execution, forward)
    with _untouched(module), torch.random.fork_rng(devices=[]):
        module.zero_grad(set_to_none=True)
        step()  # creates the momentum buffers
        return measure_step(step, standing_tensors(module, optimizer, *batch, labels))


def example_batch(inputs: InputSpec, execution: Execution, channels_last: bool = False) -> tuple[Tensor, ...]:
    """Samples as the network takes them; those that wait for their part as the data holds them."""
    waits = execution.in_parts and execution.waits_as_stored
    batch = inputs.stored_example(execution.batch_size) if waits else inputs.example(execution.batch_size)
    return images_last(batch) if channels_last else batch


def example_labels(outputs: int | Sequence[int], samples: int) -> Tensor:
    """A class for each sample, or for each position of [positions, classes] or [classes, height, width]."""
    shape = (outputs,) if isinstance(outputs, int) else tuple(outputs)
    classes, positions = (shape[0], shape[1:]) if len(shape) == 3 else (shape[-1], shape[:-1])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(classes, (samples, *positions), generator=generator)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over samples, and over positions where each has a label."""
    if labels.dim() == 2:
        return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    return functional.cross_entropy(outputs, labels)


def training_step(
    module: nn.Module, inputs: Sequence[Tensor], labels: Tensor, execution: Execution, forward: Forward | None = None
) -> tuple[Optimizer | Releasing, Callable[[], None]]:
    """Forward, backward and SGD as devices do them, at learning rate 0."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if execution.release_gradients:
        released = new_releasing(execution, trained, 0.0, lambda own, rates: new_optimizer(execution, own, 0.0, rates))

        def released_step() -> None:
            with released.releasing():
                backward(module, inputs, labels, execution, forward)

        return released, released_step
    optimizer = new_optimizer(execution, trained, lr=0.0)

    def step() -> None:
        backward(module, inputs, labels, execution, forward)
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def backward(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    labels: Tensor,
    execution: Execution,
    forward: Forward | None = None,
) -> None:
    """Gradients of the mean loss; with a micro-batch, of so many samples at a time."""
    batch = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    run = module if forward is None else partial(forward, module)
    if execution.at_once >= len(labels):
        cross_entropy(run(*batch), labels).backward()
        return
    parts = zip(*(tensor.split(execution.at_once) for tensor in batch), strict=True)
    for stored, own in zip(parts, labels.split(execution.at_once), strict=True):
        part = [_floats(one, module) for one in stored]
        # no name for the loss: it would live on beside the next part
        (cross_entropy(run(*part), own) * (len(own) / len(labels))).backward()


def _floats(stored: Tensor, module: nn.Module) -> Tensor:
    images = stored.dtype == torch.uint8 and stored.dim() == 4
    return stored.to(float_dtype(module)) if images else stored


def measure_step(step: Callable[[], object], standing: Iterable[Tensor]) -> Measured:
    """Run `step` once and measure it; `standing` are the tensors that are there before and after.

    Costs about 10 ms and changes nothing, so one ordinary batch of a training run may be measured this way.
    """
    held = live_bytes(standing)
    return Measured.of(growth(step), held)


def standing_tensors(module: nn.Module, optimizer: Optimizer | Releasing, *batch: Tensor) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    weights = [parameter for parameter in module.parameters() if not is_mapped(parameter)]
    return [*weights, *module.buffers(), *state, *batch]


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def growth(step: Callable[[], object]) -> Growth:
    """Highest rise of the allocator's live bytes while `step` runs in this thread."""
    # Kineto announces every start and stop on stderr unless told otherwise before its first use
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Garbage of earlier work with a tensor in it must not be freed, and so subtracted, while the step runs.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with profile(profile_memory=True) as recorded:
            step()
    finally:
        if collecting:
            gc.enable()
    changes: list[tuple[int, int]] = []
    calls: list[tuple[int, int]] = []
    native: list[int] = []
    for event in recorded.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            if event.device_type() == torch._C._autograd.DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        elif name in _LIBRARY:
            calls.append((event.start_ns(), event.end_ns()))
        elif name.startswith(_NATIVE):
            native.append(event.start_ns())
    changes.sort(key=lambda change: change[0])
    return _highest(changes, _without(calls, native))


def _highest(changes: list[tuple[int, int]], library: list[tuple[int, int]]) -> Growth:
    live = allocated = tensors = 0
    starts = [start for start, _ in library]
    inside = -1
    for moment, change in changes:
        call = bisect_right(starts, moment) - 1
        if call >= 0 and moment > library[call][1]:
            call = -1
        if inside >= 0 and call != inside:
            tensors = max(tensors, live)  # the convolution has returned: what is left are its results
        live += change
        allocated = max(allocated, live)
        if call < 0:
            tensors = max(tensors, live)
        inside = call
    return Growth(max(tensors, live), allocated)


def _without(calls: list[tuple[int, int]], moments: list[int]) -> list[tuple[int, int]]:
    """The intervals in which none of the moments lies."""
    calls = sorted(calls)
    starts = [start for start, _ in calls]
    hit = {bisect_right(starts, moment) - 1 for moment in moments}
    return [call for index, call in enumerate(calls) if index not in hit]


@contextmanager
def one_thread() -> Iterator[None]:
    """As devices and worker processes train."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
