"""Which devices are simulated as one vectorised network, and their training.

A pure function of cuts, sample counts and settings: never of timing, engine or number of workers. So the same seed
gives the same bits everywhere. The vectorised path agrees with train_device, the reference, to float32 rounding.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from strata.methods.base import Task
from strata.training import kernels
from strata.training.loop import Draws, Update, batches
from strata.training.memory import peak_bytes
from strata.training.phases import is_plain
from strata.training.settings import LocalTraining, cross_entropy
from strata.training.submodels import structure, warm
from strata.training.vectorised import Grouped, NotVectorisable

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

COHORT = 5  # devices in one network: two cohorts make a usual round of ten, one for each of two cores
WIDEST = 8.0  # channels; wider networks fill the machine one by one (benchmarks/training.py)
WIDEST_FOR_KERNELS = 3.0  # channels; up to here, and with no frozen layers (whose wide maps would have to be turned
# around), our own convolutions are 1.5 to 2 times as quick as torch's grouped ones
KEPT = 8  # grouped networks per graph that stay built

_Key = tuple[str, int, str, bool]  # structure of the cut, number of devices, where it runs, whether by our own kernels
_grouped: weakref.WeakKeyDictionary[ChannelGraph, OrderedDict[_Key, Grouped | None]] = weakref.WeakKeyDictionary()


def cohorts(graph: ChannelGraph, tasks: Sequence[Task], samples: Sequence[int], settings: LocalTraining,
            exact: bool = False) -> list[list[int]]:  # fmt: skip
    """Positions in `tasks` that are trained together, in the order in which their updates are added up."""
    groups: dict[object, list[int]] = {}
    is_narrow = cache(lambda cut: narrow(graph, cut))  # devices often share a cut
    for position, (task, count) in enumerate(zip(tasks, samples, strict=True)):
        alone = exact or not _simple(task, settings) or not is_narrow(task.cut)
        groups.setdefault(position if alone else (structure(graph, task.cut), count), []).append(position)
    return [part for group in groups.values() for part in _split(group)]


def train_cohort(
    graph: ChannelGraph,
    tasks: Sequence[Task],
    tensors: Sequence[Mapping[str, Tensor]],
    data: Sequence[tuple[Tensor, Tensor]],
    settings: LocalTraining,
    lr: float,
    seed: int,
) -> list[Update] | None:
    """One update per task; None where the network has no vectorised form (then the tasks are trained one by one).

    Per device: `tensors`, its cut's part of the server's state, and `data`, uint8 images and labels."""
    count = len(data[0][1])
    network = _network(graph, tasks[0].cut, len(tasks), settings)
    if network is None:
        return None
    network.load(tensors)
    parameters = list(network.own.values())
    start = [p.detach().clone() for p in parameters] if settings.proximal else []
    optimizer = settings.new_optimizer(parameters, lr)
    totals = torch.zeros(len(tasks), dtype=torch.float64)
    streams = [batches(*own, settings, Draws.of(seed, task)) for task, own in zip(tasks, data, strict=True)]
    for step in zip(*streams, strict=True):
        optimizer.zero_grad()
        with kernels.own_convolutions(settings.kernels):  # of wide frozen layers
            outputs = network([x for x, _ in step])
        labels = torch.stack([y for _, y in step]).to(settings.device)
        losses = functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view(labels.shape).mean(1)  # each device's own; their gradients do not meet
        losses.sum().backward()
        for parameter, received in zip(parameters, start, strict=False):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - received, alpha=settings.proximal)
        optimizer.step()
        totals += losses.detach().double().cpu() * labels.shape[1]
    optimizer.zero_grad()
    mean = totals / (settings.epochs * count)
    warm(graph, tasks[0].cut, settings.device).load(tensors[0])
    peak = peak_bytes(graph, tasks[0], *data[0], settings)  # of a single device on its own, and alike for all
    return [
        Update(task.round, task.device, update, count, float(loss), peak, task.cut.hash)
        for task, update, loss in zip(tasks, network.updates(), mean, strict=True)
    ]


def narrow(graph: ChannelGraph, cut: Cut) -> bool:
    """Whether overhead rules."""
    return mean_channels(graph, cut) <= WIDEST


def mean_channels(graph: ChannelGraph, cut: Cut) -> float:
    """Of the trained convolutions, over the positions of their maps; infinite where nothing of the kind is trained."""
    channels = positions = 0
    for op in graph.sized(cut, 1):
        if op.kind == "op" and op.requires_grad and "conv2d" in str(op.target):
            here = math.prod(op.shape[2:])
            channels += here * op.shape[1]
            positions += here
    return channels / positions if positions else math.inf


def _simple(task: Task, settings: LocalTraining) -> bool:
    """Element-wise optimizer, one phase, one loss, one level: then devices in one network stay apart."""
    own_code = settings.optimizer is not None or settings.loss is not cross_entropy
    in_parts = settings.micro_batch is not None or settings.activation_checkpointing is not None
    return len(task.phases) == 1 and is_plain(task.phases[0]) and not own_code and not in_parts


def _split(group: list[int]) -> list[list[int]]:
    """As even as possible, none larger than COHORT."""
    parts = -(-len(group) // COHORT)
    edges = [round(len(group) * i / parts) for i in range(parts + 1)]
    return [group[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def _network(graph: ChannelGraph, cut: Cut, devices: int, settings: LocalTraining) -> Grouped | None:
    known = _grouped.setdefault(graph, OrderedDict())
    own_kernels = bool(settings.kernels)
    key = (structure(graph, cut), devices, settings.device, own_kernels)
    if key not in known:
        try:
            very_narrow = not cut.frozen and mean_channels(graph, cut) <= WIDEST_FOR_KERNELS
            known[key] = Grouped(graph, cut, devices, settings.device, own_kernels and very_narrow)
        except NotVectorisable:
            known[key] = None
        while len(known) > KEPT:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]
