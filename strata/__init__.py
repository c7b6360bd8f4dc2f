"""Strata: train, over a fleet of devices, a network that none of them has the memory to train."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded on first use, so that `import strata` and `strata --help` need not wait for torch.
_LAZY = {
    "fit": "strata.methods.fitting",
    "plan": "strata.planning",
    "Plan": "strata.planning",
    "run": "strata.runs",
    "compare": "strata.results.compare",
    "RunConfig": "strata.runs",
    "Callback": "strata.runs",
    "EarlyStop": "strata.runs",
    "KeepBest": "strata.runs",
    "StopRun": "strata.runs",
    "create": "strata.methods",
    "SLT": "strata.methods",
    "FedAvg": "strata.methods",
    "Small": "strata.methods",
    "FD": "strata.methods",
    "FedRolex": "strata.methods",
    "HeteroFL": "strata.methods",
    "FjORD": "strata.methods",
    "BadInput": "strata.core.errors",
    "Infeasible": "strata.core.errors",
    "Execution": "strata.execution",
    "ChannelGraph": "strata.graph",
    "Cut": "strata.graph",
    "SubModel": "strata.graph",
}
_ROOMS = (
    "core",
    "models",
    "ops",
    "graph",
    "execution",
    "planning",
    "methods",
    "data",
    "training",
    "engines",
    "federation",
    "runs",
    "results",
    "report",
    "experiments",
    "fleet",
)
_SHOWN = ("data", "execution", "federation", "graph", "methods", "models", "ops", "training")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"strata.{name}")
    raise AttributeError(f"module 'strata' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What users call; the other rooms are there all the same."""
    return sorted(["__version__", *_LAZY, *_SHOWN])
