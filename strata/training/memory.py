"""Measured peak bytes of a task: a real step of the real submodel, optimizer and loss under the allocator's eyes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata.execution.measured import live_bytes, measure_step
from strata.methods.base import Phase, Task
from strata.training.phases import settings_of
from strata.training.settings import LocalTraining
from strata.training.submodels import structure
from strata.training.trainer import Trainer

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

_measured: weakref.WeakKeyDictionary[ChannelGraph, dict[Any, int]] = weakref.WeakKeyDictionary()


def peak_bytes(graph: ChannelGraph, task: Task, images: Tensor, labels: Tensor, settings: LocalTraining) -> int:
    """The highest live tensor bytes of this task's largest mini-batch, over its phases and, for FjORD, its levels.

    Bytes follow from shapes, not from values, so each kind of task is measured once per process and remembered. The
    weights that the submodel holds are used up: call it after training.
    """
    return max(_of_phase(graph, phase, images, labels, settings_of(phase, settings)) for phase in task.phases)


def _of_phase(graph: ChannelGraph, phase: Phase, images: Tensor, labels: Tensor, settings: LocalTraining) -> int:
    known = _measured.setdefault(graph, {})
    size = min(settings.batch_size, len(labels))
    kinds = tuple(structure(graph, cut) for cut in (phase.cut, *phase.levels))
    key = (kinds, size, settings)
    if key not in known:
        with torch.random.fork_rng(devices=[]):
            # copies: a view would count the whole data set that it looks into
            x = settings.augmented(images[:size].clone(), torch.Generator().manual_seed(0))
            y = labels[:size].clone()
            trainer = Trainer(graph, phase, settings, lr=0.01)
            x, y = trainer.outer.arranged(x), y.to(settings.device)
            trainer.step(x, y)  # momentum exists from the first step on
            known[key] = max(_peak(trainer, x, y, level) for level in range(len(trainer.levels)))
            trainer.release()
    return known[key]


def measured_bytes(graph: ChannelGraph, cut: Cut, settings: LocalTraining) -> int:
    """What a device with a full batch will report for this cut: for planning, where no closed form counts it."""
    images = torch.zeros(settings.batch_size, *graph.input_shape, dtype=torch.uint8)
    labels = torch.zeros(settings.batch_size, dtype=torch.long)
    return peak_bytes(graph, Task(0, 0, cut), images, labels, settings)


def _peak(trainer: Trainer, x: Tensor, y: Tensor, level: int) -> int:
    trainer.release()
    standing = trainer.standing(x, y)
    if x.device.type == "cuda":  # its allocator keeps the count
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        trainer.step(x, y, level)
        return live_bytes(standing) + torch.cuda.max_memory_allocated(x.device) - before
    return measure_step(lambda: trainer.step(x, y, level), standing).peak
