"""Work under a limit that the kernel keeps: who goes beyond it is told so at once, by an error it can report."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from types import TracebackType

from strata.core.sizes import show_bytes
from strata.planning.runtime import data_bytes

# how torch, oneDNN and the C++ library say that there is no more memory
SIGNS = ("allocate memory", "out of memory", "bad_alloc", "could not create a primitive", "could not create a memory")


class OutOfMemory(Exception):
    """The work needs more than the device's budget."""


class MemoryCap:
    """Within it this process may take `budget` + `margin` bytes on top of what it holds at the beginning, of which
    `counted` bytes (a model that is there already) belong to the budget.

    RLIMIT_DATA counts private writable memory, which is where tensors live. Only its soft value is set, so that the
    answer can be written when the work is done. Elsewhere than on Linux the budget is a promise, not a limit.
    """

    def __init__(self, budget: int | None, margin: int = 0, counted: int = 0) -> None:
        self._budget, self._margin, self._counted = budget, margin, counted
        self._before: tuple[int, int] | None = None

    def __enter__(self) -> MemoryCap:
        if self._budget is not None and sys.platform == "linux":
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._before = resource.getrlimit(resource.RLIMIT_DATA)
            cap = data_bytes() - self._counted + self._budget + self._margin
            hard = self._before[1]
            soft = cap if hard == resource.RLIM_INFINITY else min(cap, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
        if self._budget is None or error is None:
            return
        text = str(error)
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)):
            raise OutOfMemory(
                f"out of memory: the task needs more than this device's budget of {show_bytes(self._budget)}"
            ) from None
