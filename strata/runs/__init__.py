"""From settings to a run folder: config, launch, session, checkpoints, comparison, callbacks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.runs.callbacks import Callback, EarlyStop, KeepBest, StopRun
    from strata.runs.config import RunConfig, RunOptions
    from strata.runs.metrics import read_metrics
    from strata.runs.running import run
    from strata.runs.session import Result

_ROOMS = {
    "Callback": "callbacks",
    "EarlyStop": "callbacks",
    "KeepBest": "callbacks",
    "StopRun": "callbacks",
    "Result": "session",
    "RunConfig": "config",
    "RunOptions": "config",
    "read_metrics": "metrics",
    "run": "running",
}

__all__ = [
    "Callback", "EarlyStop", "KeepBest", "Result", "RunConfig", "RunOptions", "StopRun", "read_metrics", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """On first use: the command line reads the config's help texts without loading torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'strata.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"strata.runs.{_ROOMS[name]}"), name)
