"""What devices keep on their disks of the frozen layers' outputs: FLOPs that this saves, and bytes.

Counted, not reported: a device has them if its last task had the same frozen layers and no round since has changed one
(held_layers.py). A device that fails in its first such round counts as if it had got through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.execution.kept_outputs import CHECKSUM

if TYPE_CHECKING:
    from strata.methods import Task

FOLDER = "kept-outputs"  # of a run or a device
DISK = "disk_bytes"  # a key of metrics.jsonl and summary.json, where anything is kept


@dataclass(frozen=True)
class KeptPrefixes:
    each: Callable[[Task], tuple[int, int]]  # of a sample: FLOPs of the frozen part, bytes of what it puts out
    limit: int  # bytes of a device's disk
    folder: Path  # where simulated devices have theirs

    def folder_of(self, device: int) -> Path:
        return self.folder / str(device)

    def saved_flops(self, task: Task, samples: int, epochs: int, known: bool) -> int:
        """In a round; `known`: the outputs were there when it began."""
        flops, size = self.each(task)
        return flops * self._kept(samples, size) * (epochs - (not known))

    def disk_bytes(self, task: Task, samples: int) -> int:
        size = self.each(task)[1]
        return self._kept(samples, size) * (size + CHECKSUM)

    def _kept(self, samples: int, size: int) -> int:
        return min(samples, self.limit // (size + CHECKSUM)) if size else 0
