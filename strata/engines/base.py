"""What the round loop needs from an engine: it takes jobs, it yields outcomes in any order. It decides nothing.

The loop puts outcomes back into job order, so an engine's speed, order and number of workers never change a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """The answer to jobs[index]: a result, or the reason why there is none."""

    index: int
    result: Any = None
    reason: str | None = None
    detail: str = ""  # a traceback for the log, where there is one
    sent: bool = True  # False: the job never reached its device, which therefore downloaded nothing


class Program(Protocol):
    """What runs where the work is done. Picklable; made ready once per process, then called for every job."""

    def ready(self) -> None:
        """Slow preparations (build the network, map the data)."""

    def __call__(self, job: Any, state: Mapping[str, Tensor]) -> Any:
        """The result of one job, given the server's tensors of this round (which it must not write to)."""


@dataclass(frozen=True)
class Parts:
    """In place of the server's tensors where sending all would be too much: what each Cut of the job keeps of them."""

    of: Mapping[str, Mapping[str, Tensor]]  # by the Cut's hash


class Engine(Protocol):
    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        """Exactly one Outcome per job, as they finish. A job that fails costs only its own outcome."""

    def close(self) -> None:
        """Ends what the engine started. Harmless when called twice."""


def time_limit(job: Any, timeout: float | None) -> float:
    """Seconds until a job is given up: `timeout` for each of the job's `devices`, 1 unless it says otherwise. With 0 it
    is the server's own work, and nobody's to lose."""
    devices = getattr(job, "devices", 1)
    return math.inf if timeout is None or not devices else timeout * devices


class EngineFailed(Exception):
    """The engine cannot work at all (the program does not start): no device is to blame."""
