"""What runs on the cluster's nodes: warm single-threaded workers, and the loading of data from a node's own disk."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strata import __version__
from strata.core.errors import BadInput, one_line
from strata.engines import wire
from strata.engines.base import Parts
from strata.engines.common_process import IN_WORKER
from strata.engines.ray.cluster import import_ray
from strata.engines.ray.packing import Arrays, pack, unpack

WHOLE = ""  # stands for a Cut's hash where all of the server's tensors were sent


def versions() -> str:
    return f"strata {__version__} with torch {torch.__version__}"


class Worker:
    """A Ray actor. Prepared once, then called for every job; what goes wrong in a job is its answer."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths`: where the server finds modules; on nodes that have them there too, the user's own are found."""
        os.environ[IN_WORKER] = "1"
        sys.path.extend(path for path in paths if path not in sys.path)
        torch.set_num_threads(1)
        self._receiver = wire.Receiver()
        self._program: Any = None

    def greet(self) -> tuple[str, str]:
        """The node it is on, and what is installed there."""
        return str(import_ray().get_runtime_context().get_node_id()), versions()

    def check(self) -> None:
        """Answers as long as the process lives."""

    def prepare(self, program: bytes, wanted: Sequence[str], *found: Arrays) -> tuple[list[str], str, str]:
        """(the tensors that are missing, a bad input's sentence, a traceback): ready when all are empty."""
        try:
            arrays = {digest: array for some in found for digest, array in some.items()}
            missing = [digest for digest in wanted if digest not in arrays]
            if not missing:
                self._program = unpack(program, arrays)
                self._program.ready()
            return missing, "", ""
        except Exception as error:
            return [], str(error) if isinstance(error, BadInput) else "", traceback.format_exc()

    def work(self, job: bytes, hashes: Sequence[str], *tensors: bytes) -> bytes:
        try:
            task = self._receiver.load(job)
            parts = {key: wire.load(data) for key, data in zip(hashes, tensors, strict=True)}
            state = parts[WHOLE] if WHOLE in parts else Parts(parts)
            return wire.dump((self._program(task, state), None, ""))
        except Exception as error:
            return wire.dump((None, one_line(error, kind=True), traceback.format_exc()))


def load_here(source: Callable[[], Any], wanted: Sequence[str]) -> Arrays:
    """Those of the wanted tensors that this node's own files hold; the answer stays in the node's shared memory."""
    try:
        _, arrays = pack(source())
    except Exception:  # not on this node, or not readable: it is sent instead
        return {}
    return {digest: arrays[digest] for digest in wanted if digest in arrays}
