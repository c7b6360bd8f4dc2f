"""What Python and torch hold resident before a byte of the budget is spent, measured in a process of its own.

A budget counts tensors; a device needs this much more.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

from strata.core.importing import child_path
from strata.core.processes import status_bytes

# One heap, and every block from 64 KiB on returned to the kernel when it is freed: what a process holds is then what it
# uses. Read by glibc at start, so it has to be in a child's environment; `give_back_memory` does it later.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **MALLOC}
# the same by mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_CHILD = """
import json
from strata.planning.runtime import resident_bytes, tiny_step
tiny_step()
print(json.dumps(resident_bytes()))
"""


def start_measuring() -> subprocess.Popen[str]:
    """Begins in the background; `runtime_bytes` collects the answer."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD], env=child_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def runtime_bytes(child: subprocess.Popen[str] | None = None) -> int | None:
    """None where it cannot be measured: no Linux, or no memory for a second process."""
    child = child or start_measuring()
    try:
        out, _ = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        stop_measuring(child)
        return None
    return None if child.returncode else int(json.loads(out))


def stop_measuring(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def child_environment() -> dict[str, str]:
    """The parent's, with one thread and no hoarding, able to import what the parent can."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": child_path()}


def give_back_memory() -> bool:
    """For a process of your own that trains on a device: from now on what it frees goes back to the kernel, as in
    Strata's device processes. False where the C library is not glibc, which has another way of its own."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 65536), (_M_TRIM_THRESHOLD, 65536))
    taken = [mallopt(number, value) == 1 for number, value in settings]
    return all(taken)


def tiny_step() -> None:
    """A training step too small to matter: loads what torch loads lazily (kernels, autograd, the optimizer)."""
    import torch
    from torch import nn

    from strata.execution.optimizers import SGD

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    optimizer = SGD(list(model.parameters()), lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.zeros(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def data_bytes() -> int:
    """Private writable memory, used or only reserved: what RLIMIT_DATA limits."""
    return status_bytes("VmData")
