"""What a worker process does: trains a device's task, evaluates a part of the test set, makes the final model."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from strata.cutting import ChannelGraph, Cut
from strata.training import (
    Evaluation,
    LocalTraining,
    Update,
    calibration_indices,
    combine,
    evaluate_units,
    plain_state,
    reestimated,
    train_cohort,
    train_device,
    units,
)

if TYPE_CHECKING:
    from strata.data import ImageSet
    from strata.engines import Engine
    from strata.methods import Task

UNITS_PER_JOB = {"re-estimated": 4, "batch": 1}  # batches of 125 or 1024 images: jobs small enough to share evenly


@dataclass(frozen=True)
class TrainJob:
    """One device's task. Which samples it holds travels along; the samples themselves are where the work is done."""

    task: Task
    samples: np.ndarray
    lr: float
    seed: int


@dataclass(frozen=True)
class CohortJob:
    """Devices that are simulated as one vectorised network (training/cohorts.py); the answer is a list, in order."""

    jobs: tuple[TrainJob, ...]


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


@dataclass(frozen=True)
class FinishJob:
    """The state the plain nn.Module loads."""

    cut: Cut
    seed: int


@dataclass
class DeviceProgram:
    model: nn.Module
    input_shape: tuple[int, ...]
    train: ImageSet
    parts: Mapping[str, ImageSet]
    training: LocalTraining
    graph: ChannelGraph | None = field(default=None, compare=False)
    _calibrated: tuple[Any, dict[str, Tensor]] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "graph": None, "_calibrated": None}

    def ready(self) -> None:
        if self.graph is None:
            self.graph = ChannelGraph(self.model, input_shape=self.input_shape)

    def __call__(self, job: TrainJob | CohortJob | EvaluateJob | FinishJob, state: Mapping[str, Tensor]) -> Any:
        assert self.graph is not None
        if isinstance(job, TrainJob):
            tensors = job.task.cut.extract(state)
            return train_device(self.graph, job.task, tensors, *self._own(job), self.training, job.lr, job.seed)
        if isinstance(job, CohortJob):
            return self._train_together(job.jobs, state)
        if isinstance(job, FinishJob):
            return plain_state(self.graph, job.cut, state, self._calibration(job.seed), self.training)
        part = self.parts[job.part]
        return evaluate_units(
            self.graph, job.cut, self._tensors(job, state), part.images, part.labels, self.training, job.bn, job.numbers
        )

    def _own(self, job: TrainJob) -> tuple[Tensor, Tensor]:
        """The device's images and labels."""
        index = torch.from_numpy(np.ascontiguousarray(job.samples))
        return self.train.images[index], self.train.labels[index]

    def _train_together(self, jobs: Sequence[TrainJob], state: Mapping[str, Tensor]) -> list[Update | Failed]:
        assert self.graph is not None
        tasks = [job.task for job in jobs]
        try:
            updates = train_cohort(
                self.graph, tasks, [task.cut.extract(state) for task in tasks], [self._own(job) for job in jobs],
                self.training, jobs[0].lr, jobs[0].seed,
            )  # fmt: skip
        except Exception:  # whoever is to blame shows when each is on its own
            updates = None
        return [self._alone(job, state) for job in jobs] if updates is None else list(updates)

    def _alone(self, job: TrainJob, state: Mapping[str, Tensor]) -> Update | Failed:
        try:
            update: Update = self(job, state)
            return update
        except Exception as error:
            return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _tensors(self, job: EvaluateJob, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if job.bn == "batch":
            return job.cut.extract(state)
        assert self.graph is not None
        key = (job.cut.hash, job.round, job.seed)
        if self._calibrated is None or self._calibrated[0] != key:
            extracted = job.cut.extract(state)
            made = reestimated(self.graph, job.cut, extracted, self._calibration(job.seed), self.training)
            self._calibrated = (key, made)
        return self._calibrated[1]

    def _calibration(self, seed: int) -> Tensor:
        return self.train.images[calibration_indices(len(self.train), seed)]


def evaluate(
    engine: Engine, state: Mapping[str, Tensor], cut: Cut, samples: int, part: str, bn: str, round: int, seed: int
) -> Evaluation:
    """Accuracy of the cut on a part of the data, by the engine's workers; the same bits however they share it."""
    count = units(samples, bn)
    each = UNITS_PER_JOB[bn]
    jobs = [
        EvaluateJob(cut, round, part, bn, tuple(range(start, min(start + each, count))), seed)
        for start in range(0, count, each)
    ]
    return combine([unit for result in results(engine, jobs, state) for unit in result], bn)


def final_state(engine: Engine, state: Mapping[str, Tensor], cut: Cut, seed: int) -> dict[str, Tensor]:
    finished: dict[str, Tensor] = next(iter(results(engine, [FinishJob(cut, seed)], state)))
    return finished


def results(engine: Engine, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> list[Any]:
    """For work that is the server's own: no device is to blame if it fails."""
    found: dict[int, Any] = {}
    for outcome in engine.run(jobs, state):
        if outcome.reason is not None:
            raise RuntimeError(f"evaluation failed: {outcome.reason}\n{outcome.detail}")
        found[outcome.index] = outcome.result
    return [found[index] for index in range(len(jobs))]
