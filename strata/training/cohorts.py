"""Which devices are simulated as one vectorised network, and their training.

A pure function of cuts, sample counts and settings: never of timing, engine or number of workers. So the same seed
gives the same bits everywhere. The vectorised path agrees with train_device, the reference, to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.execution.norm_statistics import fixed_norms
from strata.methods.base import Task
from strata.training import kernels
from strata.training.loop import Draws, Update, batches
from strata.training.memory import peak_bytes
from strata.training.phases import is_plain, settings_of
from strata.training.settings import LocalTraining
from strata.training.shortened import shortened
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
        alone = exact or not is_narrow(task.cut) or not _simple(workspace, task, settings)
        key = position if alone else (workspace.structure(task.cut), count, task.phases[0].execution)
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
    phase, lean = tasks[0].phases[0], settings
    settings, group = shortened(workspace, phase, settings_of(phase, settings, tasks[0].round))
    network = workspace.network(tasks[0].cut, len(tasks), settings, group)
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
    peak = peak_bytes(workspace, tasks[0], data[0], lean)  # of a single device on its own, and alike for all
    return [
        Update(task.round, task.device, update, count, float(loss), peak, task.cut.hash)
        for task, update, loss in zip(tasks, network.updates(), mean, strict=True)
    ]


def narrow(graph: ChannelGraph, cut: Cut) -> bool:
    """Whether overhead rules."""
    return mean_channels(graph, cut) <= WIDEST


def _simple(workspace: Workspace, task: Task, settings: LocalTraining) -> bool:
    """Element-wise optimizer, no clipping, one phase, one loss, one level: then devices in one network stay apart.
    Lean ones only by a way that keeps nothing back."""
    (phase, *others) = task.phases
    if others or not is_plain(phase) or len(workspace.graph.output_shape) > 2:  # channels of maps lie side by side
        return False
    chosen = settings_of(phase, settings, task.round)
    if chosen.optimizer is not None or not chosen.by_objective or chosen.clip is not None:
        return False
    if fixed_norms(workspace.graph, task.cut, chosen):
        return False
    if not chosen.shortened:
        return phase.execution is None and not chosen.is_lean
    plain, _ = shortened(workspace, phase, chosen)
    return not replace(plain, momentum_dtype="float32").is_lean


def _split(group: list[int]) -> list[list[int]]:
    """As even as possible, none larger than COHORT."""
    parts = -(-len(group) // COHORT)
    edges = [round(len(group) * i / parts) for i in range(parts + 1)]
    return [group[a:b] for a, b in zip(edges, edges[1:], strict=False)]
