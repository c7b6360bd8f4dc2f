"""Which devices are simulated as one vectorised network, and their training.

A pure function of cuts, sample counts and settings: never of timing, engine or number of workers. So the same seed
gives the same bits everywhere. The vectorised path agrees with train_device, the reference, to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.execution.norm_statistics import fixed_norms
from strata.methods.base import Task
from strata.training import kernels
from strata.training.loop import Draws, Update, batches
from strata.training.memory import peak_bytes
from strata.training.phases import is_plain
from strata.training.settings import LocalTraining
from strata.training.vectorised.width import mean_channels
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.data.samples import Samples
    from strata.graph import ChannelGraph, Cut

COHORT = 5  # devices in one network: two cohorts make a usual round of ten, one for each of two cores
WIDEST = 8.0  # channels; wider networks fill the machine one by one (benchmarks/training.py)


def cohorts(
    workspace: Workspace,
    tasks: Sequence[Task],
    samples: Sequence[int],
    settings: LocalTraining,
    exact: bool = False,
) -> list[list[int]]:
    """Positions in `tasks` that are trained together, in the order in which their updates are added up."""
    groups: dict[object, list[int]] = {}
    is_narrow = cache(lambda cut: narrow(workspace.graph, cut))  # devices often share a cut
    for position, (task, count) in enumerate(zip(tasks, samples, strict=True)):
        fixed = fixed_norms(workspace.graph, task.cut, settings.in_round(task.round))
        alone = exact or bool(fixed) or not _simple(task, settings) or not is_narrow(task.cut)
        key = position if alone else (workspace.structure(task.cut), count)
        groups.setdefault(key, []).append(position)
    return [part for group in groups.values() for part in _split(group)]


def train_cohort(
    workspace: Workspace,
    tasks: Sequence[Task],
    tensors: Sequence[Mapping[str, Tensor]],
    data: Sequence[Samples],
    settings: LocalTraining,
    lr: float,
    seed: int,
) -> list[Update] | None:
    """One update per task; None where the network has no vectorised form (then the tasks are trained one by one).

    Per device: `tensors`, its cut's part of the server's state, and `data`, its samples."""
    count = len(data[0])
    network = workspace.network(tasks[0].cut, len(tasks), settings)
    if network is None:
        return None
    network.load(tensors)
    parameters = list(network.own.values())
    start = [p.detach().clone() for p in parameters] if settings.proximal else []
    optimizer = settings.new_optimizer(parameters, lr)
    totals = torch.zeros(len(tasks), dtype=torch.float64)
    streams = [batches(own, settings, Draws.of(seed, task)) for task, own in zip(tasks, data, strict=True)]
    for step in zip(*streams, strict=True):
        optimizer.zero_grad()
        with kernels.own_convolutions(settings.kernels):  # of wide frozen layers
            outputs = network([x for x, _ in step])
        targets = torch.stack([y for _, y in step]).to(settings.device)
        losses = settings.objective.loss(outputs.flatten(0, 1), targets.flatten(0, 1))
        losses = losses.view(targets.shape[:2]).mean(1)  # each device's own; their gradients do not meet
        losses.sum().backward()
        for parameter, received in zip(parameters, start, strict=False):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - received, alpha=settings.proximal)
        optimizer.step()
        totals += losses.detach().double().cpu() * targets.shape[1]
    optimizer.zero_grad()
    mean = totals / (settings.epochs * count)
    workspace.submodel(tasks[0].cut, settings.device).load(tensors[0])
    peak = peak_bytes(workspace, tasks[0], data[0], settings)  # of a single device on its own, and alike for all
    return [
        Update(task.round, task.device, update, count, float(loss), peak, task.cut.hash)
        for task, update, loss in zip(tasks, network.updates(), mean, strict=True)
    ]


def narrow(graph: ChannelGraph, cut: Cut) -> bool:
    """Whether overhead rules."""
    return mean_channels(graph, cut) <= WIDEST


def _simple(task: Task, settings: LocalTraining) -> bool:
    """Element-wise optimizer, no clipping, one phase, one loss, one level: then devices in one network stay apart."""
    own_code = settings.optimizer is not None or not settings.by_objective or settings.clip is not None
    return len(task.phases) == 1 and is_plain(task.phases[0]) and not own_code and not settings.is_lean


def _split(group: list[int]) -> list[list[int]]:
    """As even as possible, none larger than COHORT."""
    parts = -(-len(group) // COHORT)
    edges = [round(len(group) * i / parts) for i in range(parts + 1)]
    return [group[a:b] for a, b in zip(edges, edges[1:], strict=False)]
