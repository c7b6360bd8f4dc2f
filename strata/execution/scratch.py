"""Library scratch: what oneDNN takes beside the tensors of a step, as much as its kernels for this processor like to
have. No closed form knows it, so a real step is measured, once per machine and shape: the answer is kept on disk.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from strata.core import cache as disk
from strata.core.processor import processor_abilities, processor_name
from strata.execution.accountings import measure_cut
from strata.execution.measured import one_thread

if TYPE_CHECKING:
    from strata.execution.execution import Execution
    from strata.graph import ChannelGraph, Cut

FOLDER = "scratch"
MOST_BYTES = 4 << 20  # of all answers together


def scratch_bytes(graph: ChannelGraph, cut: Cut, execution: Execution) -> int:
    """What a step of the cut takes above its peak of tensors, with one thread, as devices train."""
    known = known_scratch(graph, cut, execution)
    if known is not None:
        return known
    with one_thread():
        found = measure_cut(graph, cut, execution.alone).scratch
    remember_scratch(graph, cut, execution, found)
    return found


def remember_scratch(graph: ChannelGraph, cut: Cut, execution: Execution, found: int) -> None:
    """For whoever has measured it anyway."""
    path = _path(graph, cut, execution)
    if path is not None:
        disk.write(path, str(found).encode())
        disk.prune(path.parent, MOST_BYTES)


def known_scratch(graph: ChannelGraph, cut: Cut, execution: Execution) -> int | None:
    """The same where it has been measured before; None: not yet."""
    path = _path(graph, cut, execution)
    return None if path is None else _read(path)


def _path(graph: ChannelGraph, cut: Cut, execution: Execution) -> Path | None:
    folder = disk.private_folder(FOLDER)
    if folder is None:
        return None
    shapes = sorted((name, tuple(shape)) for name, shape in cut.shapes.items())
    parts = (
        torch.__version__,
        processor_name(),
        processor_abilities(),
        graph.hash,
        cut.output,
        shapes,
        sorted(cut.frozen),
        execution.alone,
    )
    return folder / hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(path: Path) -> int | None:
    content = disk.read(path)
    if content is None or not content.isdigit():
        return None
    disk.touch(path)
    return int(content)
