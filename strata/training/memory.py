"""Measured peak bytes of a task: a real step of the real submodel, optimizer and loss under the allocator's eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.data.samples import Batch, Samples
from strata.execution.measured import live_bytes, measure_step
from strata.methods.base import Phase, Task
from strata.training.phases import settings_of
from strata.training.settings import LocalTraining
from strata.training.trainer import Trainer
from strata.training.waiting import Waiting
from strata.training.workspace import Workspace

if TYPE_CHECKING:
    from strata.graph import Cut


def peak_bytes(workspace: Workspace, task: Task, samples: Samples, settings: LocalTraining) -> int:
    """The highest live tensor bytes of this task's largest mini-batch, over its phases and, for FjORD, its levels.

    Bytes follow from shapes, not from values, so each kind of task is measured once per process and remembered. The
    weights that the submodel holds are used up: call it after training.
    """
    return max(_of_phase(workspace, phase, samples, settings_of(phase, settings, task.round)) for phase in task.phases)


def _of_phase(workspace: Workspace, phase: Phase, samples: Samples, settings: LocalTraining) -> int:
    size = min(settings.batch_size, len(samples))
    kinds = tuple(workspace.structure(cut) for cut in (phase.cut, *phase.levels))
    kind = (kinds, phase.distilled, size, settings)
    return workspace.measured(kind, lambda: _measure(workspace, phase, samples, settings, size))


def _measure(workspace: Workspace, phase: Phase, samples: Samples, settings: LocalTraining, size: int) -> int:
    with torch.random.fork_rng(devices=[]):
        # copies: a view would count the whole data set that it looks into
        batch = tuple(tensor[:size].clone() for tensor in samples.tensors)
        y = samples.targets[:size].clone().to(settings.device)
        trainer = Trainer(workspace, phase, settings, lr=0.01)
        generator = torch.Generator().manual_seed(0)
        x: Batch | Waiting
        if size > settings.at_once:
            x = settings.waiting(batch, generator)
        else:
            x = trainer.outer.arranged(settings.augmented(batch, generator))
        del batch
        trainer.step(x, y)  # momentum exists from the first step on
        highest = max(_peak(trainer, x, y, level) for level in range(len(trainer.levels)))
        trainer.release()
        return highest


def measured_bytes(workspace: Workspace, cut: Cut, settings: LocalTraining) -> int:
    """What a device with a full batch will report for this cut: for planning, where no closed form counts it."""
    inputs = workspace.graph.inputs
    # without a function of the user's, data of images holds 8-bit ones: as `memory` counts them
    made = inputs.stored_example if settings.waits_as_stored else inputs.example
    example = dict(zip(inputs.names, made(settings.batch_size), strict=True))
    targets = settings.objective.example(settings.batch_size, workspace.graph.output_shape)
    return peak_bytes(workspace, Task(0, 0, cut), Samples(example, targets), settings)


def _peak(trainer: Trainer, x: Batch | Waiting, y: Tensor, level: int) -> int:
    trainer.release()
    standing = trainer.standing(x, y)
    if y.device.type == "cuda":  # its allocator keeps the count
        torch.cuda.reset_peak_memory_stats(y.device)
        before = torch.cuda.memory_allocated(y.device)
        trainer.step(x, y, level)
        return live_bytes(standing) + torch.cuda.max_memory_allocated(y.device) - before
    return measure_step(lambda: trainer.step(x, y, level), standing).peak
