"""The workers of a run: processes on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from strata.core.errors import BadInput
from strata.data import FederatedData, Samples
from strata.engines import Engine, InlineEngine, LocalEngine, default_workers
from strata.engines.ray import Ray
from strata.federation.jobs import DeviceProgram, cuts_of
from strata.graph import Cut
from strata.runs.components import Machine
from strata.training import LocalTraining, Workspace


def make_engine(
    model: nn.Module,
    data: FederatedData,
    training: LocalTraining,
    workers: int | None = None,
    *,
    held: Samples | None = None,
    workspace: Workspace | None = None,
    timeout: float | None = None,
    ray: Ray | None = None,
    source: Callable[[], Any] | None = None,
) -> Engine:
    """The engine for runs of this model on this data: the local one, or on `ray`; several runs may share one.

    `training` from `complete`, `held`: validation images. Worker processes begin to prepare at once.
    `source` makes `data` and `held` from files, for nodes of a cluster that have them too.
    """
    parts = {"test": data.test} | ({"validation": held} if held is not None else {})
    program = DeviceProgram(model, data.inputs, data.train, parts, training)
    if ray is not None:
        return _on_ray(program, ray, workers, source, timeout)
    workers = default_workers() if workers is None else workers
    if workers < 0:
        raise BadInput(f"workers are 0 (all in this process) or more, not {workers}")
    if workers == 0:
        program.workspace = workspace
        return InlineEngine(program)
    return LocalEngine(program, workers, shared=(Cut,), timeout=timeout)


def _on_ray(
    program: DeviceProgram, ray: Ray, workers: int | None, source: Callable[[], Any] | None, timeout: float | None
) -> Engine:
    from strata.engines.ray.engine import RayEngine

    device = program.training.device
    if device not in ("cpu", "cuda"):
        raise BadInput(f"on Ray each worker sees its own GPUs only: give the device cuda, not {device}")
    if (device == "cuda") != (ray.gpus > 0):
        raise BadInput(
            "on Ray the device cuda and a share of a GPU for each worker belong together: give both (--device cuda "
            "--ray-gpus 0.25, for example) or neither"
        )
    return RayEngine(program, ray, workers, cuts=cuts_of, source=source, shared=(Cut,), timeout=timeout)


def ray_of(machine: Machine) -> Ray | None:
    return Ray(machine.ray_address, machine.ray_gpus or 0.0) if machine.engine == "ray" else None
