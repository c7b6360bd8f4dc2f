"""Bytes, FLOPs and traffic of a cut, without training; and what a real training step takes, to check them.

Loaded on first use: what describes a run's settings (`Execution`) must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.execution.accountings import ACCOUNTINGS, Memory, flops, measure_cut, memory, state_bytes
    from strata.execution.compute import Flops, Traffic, traffic
    from strata.execution.execution import Execution
    from strata.execution.measured import Measured, backward, measure, measure_step
    from strata.execution.placement import training_forward
    from strata.execution.scratch import scratch_bytes
    from strata.execution.traced import trace

__all__ = [
    "ACCOUNTINGS",
    "Execution",
    "Flops",
    "Measured",
    "Memory",
    "Traffic",
    "backward",
    "flops",
    "measure",
    "measure_cut",
    "measure_step",
    "memory",
    "scratch_bytes",
    "state_bytes",
    "trace",
    "traffic",
    "training_forward",
]
_FILES = {
    "ACCOUNTINGS": "accountings",
    "Execution": "execution",
    "Flops": "compute",
    "Measured": "measured",
    "Memory": "accountings",
    "Traffic": "compute",
    "backward": "measured",
    "flops": "accountings",
    "measure": "measured",
    "measure_cut": "accountings",
    "measure_step": "measured",
    "memory": "accountings",
    "scratch_bytes": "scratch",
    "state_bytes": "accountings",
    "trace": "traced",
    "traffic": "compute",
    "training_forward": "placement",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"strata.execution.{_FILES[name]}"), name)
    raise AttributeError(f"module 'strata.execution' has no attribute {name!r}")
