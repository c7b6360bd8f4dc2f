"""Built submodels, kept warm: tasks whose cuts have the same structure share one module and only load other weights."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.graph.rewrite import steps
from strata.training.chunked import Chunked, NotChunkable

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

KEPT = 32  # modules per graph: the levels of a fleet and what is evaluated, with room to spare
KEPT_BYTES = 256 * 2**20  # of their weights, in all; at least two modules stay
STRUCTURES_KEPT = 1024  # random cuts come without end

_structures: weakref.WeakKeyDictionary[ChannelGraph, OrderedDict[str, str]] = weakref.WeakKeyDictionary()
_cache: weakref.WeakKeyDictionary[ChannelGraph, OrderedDict[str, Warm]] = weakref.WeakKeyDictionary()


@dataclass
class Warm:
    """A built submodel. Convolutions run up to twice as fast on CPUs with channels last in memory."""

    module: nn.Module
    channels_last: bool
    parameters: dict[str, nn.Parameter]
    state: dict[str, Tensor]  # parameters and buffers: the module's own tensors
    device: str = "cpu"
    by_chunks: Callable[[Warm, Tensor], Tensor] | None = None  # under batch statistics; None: only as a whole

    @cached_property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.state.items():
                own.copy_(tensors[name])
        for parameter in self.parameters.values():
            parameter.grad = None

    def arranged(self, images: Tensor) -> Tensor:
        images = images.to(self.device)
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images


def warm(graph: ChannelGraph, cut: Cut, device: str = "cpu") -> Warm:
    """The module for this cut, with whatever weights it had last: `load` comes next."""
    modules = _cache.setdefault(graph, OrderedDict())
    key = f"{structure(graph, cut)} {device}"
    if key not in modules:
        modules[key] = _build(graph, cut, device)
    modules.move_to_end(key)
    while len(modules) > KEPT or (len(modules) > 2 and sum(kept.bytes for kept in modules.values()) > KEPT_BYTES):
        modules.popitem(last=False)
    return modules[key]


def structure(graph: ChannelGraph, cut: Cut) -> str:
    """Equal for cuts whose submodels differ in weights only: same shapes, frozen layers, calls and index constants."""
    known = _structures.setdefault(graph, OrderedDict())
    if cut.hash not in known:
        known[cut.hash] = _digest(graph, cut)
        if len(known) > STRUCTURES_KEPT:
            known.popitem(last=False)
    return known[cut.hash]


def _digest(graph: ChannelGraph, cut: Cut) -> str:
    digest = hashlib.sha256(repr((cut.shapes, sorted(cut.frozen))).encode())
    table = graph.kept_table(cut)
    for name, constant in graph.cut_constants(table).items():
        digest.update(f"{name} {constant.tolist()}\n".encode())
    for mode in ("train", "eval"):
        for step in steps(graph.mode(mode), table):
            cuts = [(one.input, one.dim, one.positions.tolist()) for one in step.cuts]
            digest.update(f"{step.node} {cuts} {step.call.target} {step.call.args} {step.call.kwargs}\n".encode())
    return digest.hexdigest()


def _build(graph: ChannelGraph, cut: Cut, device: str) -> Warm:
    module: nn.Module = graph.submodel(cut)
    channels_last = len(graph.input_shape) == 3 and _runs_channels_last(module, graph.input_shape)
    module.to(device)
    state = dict(module.state_dict(keep_vars=True))
    by_chunks: Chunked | None = None
    with contextlib.suppress(NotChunkable):
        by_chunks = Chunked(graph, cut)
    return Warm(module, channels_last, dict(module.named_parameters()), state, device, by_chunks)


def _runs_channels_last(module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether it runs so: a `view` in the network may insist on the usual order in memory."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks this form
    images = torch.zeros(2, *input_shape).contiguous(memory_format=torch.channels_last)
    try:
        with torch.inference_mode():
            module.eval()(images)
    except RuntimeError:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False
    finally:
        module.train()
    return True
