"""What a worker process does: trains a device's task, evaluates a part of the test set, makes the final model."""

from __future__ import annotations

import secrets
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from strata.core.errors import one_line
from strata.data.objectives import Classification
from strata.engines.base import EngineFailed, Parts
from strata.graph import ChannelGraph, Cut
from strata.training import (
    Calibration,
    Evaluation,
    LocalTraining,
    Update,
    Workspace,
    calibration_indices,
    combine,
    evaluate_units,
    kernels,
    plain_state,
    reestimated,
    train_cohort,
    train_device,
    units,
)

if TYPE_CHECKING:
    from strata.data import Objective, Samples
    from strata.engines import Engine
    from strata.graph.inputs import InputSpec
    from strata.methods import DeviceState, Task

CLASSIFICATION = Classification()
PLAIN_CALIBRATION = Calibration()
UNITS_PER_JOB = {"re-estimated": 8, "batch": 1}  # batches of 64 or 1024 samples: jobs small enough to share evenly


@dataclass(frozen=True)
class TrainJob:
    """One device's task. Which samples it holds travels along; the samples themselves are where the work is done."""

    task: Task
    samples: np.ndarray
    lr: float
    seed: int
    keeping: DeviceState | None = None  # with what the device `kept`, where the method wants it to keep something
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    disk: Path | None = None  # the device's folder for what frozen layers put out, where that is kept

    devices: ClassVar[int] = 1  # whose work a job is: an engine gives it up after so many times its time limit


@dataclass(frozen=True)
class CohortJob:
    """Devices that are simulated as one vectorised network (training/cohorts.py); the answer is a list, in order."""

    jobs: tuple[TrainJob, ...]

    @property
    def devices(self) -> int:
        return len(self.jobs)


@dataclass(frozen=True)
class Failed:
    """One device of a cohort gave no update."""

    reason: str
    detail: str


@dataclass(frozen=True)
class EvaluateJob:
    """Some units of a part (`test` or `validation`) of the data, after `round` rounds."""

    cut: Cut
    round: int
    part: str
    bn: str
    numbers: tuple[int, ...]
    seed: int
    calibration: Calibration = Calibration()
    fixed: tuple[str, ...] = ()  # batch norms whose statistics are the state's own, by their running means
    devices: ClassVar[int] = 0  # the server's own work has no limit
    weights: str = field(default_factory=lambda: secrets.token_hex(8))  # jobs that share it have the same weights


@dataclass(frozen=True)
class FinishJob:
    """The state the plain nn.Module loads."""

    cut: Cut
    seed: int
    calibration: Calibration = Calibration()
    fixed: tuple[str, ...] = ()
    devices: ClassVar[int] = 0
    weights: str = field(default_factory=lambda: secrets.token_hex(8))  # as an EvaluateJob's


@dataclass(frozen=True)
class StatisticsJob(FinishJob):
    """The statistics of the cut's batch norms, measured as for evaluation: its buffers."""


@dataclass
class DeviceProgram:
    model: nn.Module
    inputs: InputSpec | tuple[int, ...]
    train: Samples
    parts: Mapping[str, Samples]
    training: LocalTraining
    workspace: Workspace | None = field(default=None, compare=False)  # of the process that does the work
    _calibrated: tuple[str, dict[str, Tensor]] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "workspace": None, "_calibrated": None}

    def ready(self) -> None:
        if self.training.kernels:  # decided by another machine, perhaps
            kernels.require()
        if self.workspace is None:
            self.workspace = Workspace(ChannelGraph(self.model, self.inputs))

    def __call__(self, job: TrainJob | CohortJob | EvaluateJob | FinishJob, state: Mapping[str, Tensor] | Parts) -> Any:
        assert self.workspace is not None
        if isinstance(job, TrainJob):
            return self._train(job, _extracted(job.task.cut, state))
        if isinstance(job, CohortJob):
            return self._train_together(job.jobs, state)
        if isinstance(job, StatisticsJob):
            measured = self._reestimated(job, state)
            return {name: measured[name] for name in self.workspace.graph.buffer_names if name in measured}
        if isinstance(job, FinishJob):
            return plain_state(job.cut, _widened(job.cut, state), self._calibrated_tensors(job, state))
        tensors = _extracted(job.cut, state) if job.bn == "batch" else self._calibrated_tensors(job, state)
        part = self.parts[job.part]
        return evaluate_units(self.workspace, job.cut, tensors, part, self.training, job.bn, job.numbers, job.fixed)

    def _train(self, job: TrainJob, received: dict[str, Tensor]) -> Update:
        assert self.workspace is not None
        task, own, keeping = job.task, self.train.subset(job.samples), job.keeping
        if keeping is None:
            return train_device(self.workspace, task, received, own, self.training, job.lr, job.seed, job.disk)
        start = keeping.before(task, received, job.kept)
        update = train_device(self.workspace, task, start, own, self.training, job.lr, job.seed, job.disk)
        sent, kept = keeping.after(task, received, update.tensors, job.kept)
        return replace(update, tensors=sent, kept=kept)

    def _train_together(self, jobs: Sequence[TrainJob], state: Mapping[str, Tensor] | Parts) -> list[Update | Failed]:
        assert self.workspace is not None
        tasks = [job.task for job in jobs]
        updates, reason = None, ""
        try:
            tensors = [_extracted(task.cut, state) for task in tasks]
            own = [self.train.subset(job.samples) for job in jobs]
            updates = train_cohort(self.workspace, tasks, tensors, own, self.training, jobs[0].lr, jobs[0].seed)
        except Exception as error:  # whoever is to blame shows when each is on its own
            reason = one_line(error, kind=True)
        if updates is not None:
            return list(updates)
        alone = [self._alone(job, state) for job in jobs]
        if reason and not any(isinstance(one, Failed) for one in alone):
            warnings.warn(f"devices that could only be trained one by one: {len(jobs)} ({reason})", stacklevel=2)
        return alone

    def _alone(self, job: TrainJob, state: Mapping[str, Tensor] | Parts) -> Update | Failed:
        try:
            update: Update = self(job, state)
            return update
        except Exception as error:
            return Failed(one_line(error, kind=True), traceback.format_exc())

    def _calibrated_tensors(
        self, job: EvaluateJob | FinishJob, state: Mapping[str, Tensor] | Parts
    ) -> dict[str, Tensor]:
        """Measured once for all jobs with the same weights."""
        if self._calibrated is None or self._calibrated[0] != job.weights:
            self._calibrated = (job.weights, self._reestimated(job, state))
        return self._calibrated[1]

    def _reestimated(self, job: EvaluateJob | FinishJob, state: Mapping[str, Tensor] | Parts) -> dict[str, Tensor]:
        assert self.workspace is not None
        extracted = _extracted(job.cut, state)
        return reestimated(self.workspace, job.cut, extracted, self._calibration(job), self.training, job.fixed)

    def _calibration(self, job: EvaluateJob | FinishJob) -> Samples:
        asked = job.calibration
        source = self.train if asked.part == "train" else self.parts[asked.part]
        return source.subset(calibration_indices(len(source), job.seed, asked.images))


def cuts_of(job: TrainJob | CohortJob | EvaluateJob | FinishJob) -> tuple[Cut, ...]:
    """All that a job needs of the server's tensors."""
    if isinstance(job, CohortJob):
        return tuple(one.task.cut for one in job.jobs)
    return (job.task.cut,) if isinstance(job, TrainJob) else (job.cut,)


def _extracted(cut: Cut, state: Mapping[str, Tensor] | Parts) -> dict[str, Tensor]:
    """A copy of the job's own, also where devices of a cohort share a Cut."""
    if isinstance(state, Parts):
        return {name: tensor.clone() for name, tensor in state.of[cut.hash].items()}
    return cut.extract(state)


def _widened(cut: Cut, state: Mapping[str, Tensor] | Parts) -> Mapping[str, Tensor]:
    """The server's tensors; what was not sent, and is outside the cut, is zero."""
    if not isinstance(state, Parts):
        return state
    part, shapes = state.of[cut.hash], zip(cut.entries, cut.full_shapes, strict=True)
    whole = {name: torch.zeros(shape, dtype=part[name].dtype) for (name, _), shape in shapes}
    cut.scatter(whole, part)
    return whole


def evaluate(
    engine: Engine,
    state: Mapping[str, Tensor],
    cut: Cut,
    samples: int,
    part: str,
    bn: str,
    round: int,
    seed: int,
    calibration: Calibration = PLAIN_CALIBRATION,
    objective: Objective = CLASSIFICATION,
    fixed: Collection[str] = (),
    weights: str | None = None,
) -> Evaluation:
    """The cut's score on a part of the data, by the engine's workers; the same bits however they share it.

    `fixed`: batch norms whose statistics are the state's own. `weights`: a name for the state, the cut and `fixed`,
    where more is asked of them: what was measured for one question is there for the next."""
    count = units(samples, bn)
    each = UNITS_PER_JOB[bn]
    first = EvaluateJob(
        cut, round, part, bn, (), seed, calibration, held_norms(cut, fixed), weights or secrets.token_hex(8)
    )
    jobs = [replace(first, numbers=tuple(range(start, min(start + each, count)))) for start in range(0, count, each)]
    found = [unit for result in results(engine, jobs, state) for unit in result]
    return combine(found, bn, objective)


def final_state(
    engine: Engine,
    state: Mapping[str, Tensor],
    cut: Cut,
    seed: int,
    calibration: Calibration = PLAIN_CALIBRATION,
    fixed: Collection[str] = (),
    weights: str | None = None,
) -> dict[str, Tensor]:
    """What the plain nn.Module loads; `weights` as in `evaluate`."""
    job = FinishJob(cut, seed, calibration, held_norms(cut, fixed), weights or secrets.token_hex(8))
    finished: dict[str, Tensor] = next(iter(results(engine, [job], state)))
    return finished


def held_norms(cut: Cut, fixed: Collection[str]) -> tuple[str, ...]:
    """Those of the fixed norms that the cut has."""
    return tuple(sorted(name for name in fixed if name in cut.shapes))


def results(engine: Engine, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> list[Any]:
    """For work that is the server's own: no device is to blame if it fails."""
    found: dict[int, Any] = {}
    for outcome in engine.run(jobs, state):
        if outcome.reason is not None:
            raise EngineFailed(f"evaluation failed: {outcome.reason}\n{outcome.detail}".rstrip())
        found[outcome.index] = outcome.result
    return [found[index] for index in range(len(jobs))]
