"""What memory this system has left, and a limit on a process's own that the kernel keeps."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata_device.errors import OutOfMemory

CGROUPS = Path("/sys/fs/cgroup")
MIB = 2**20
MARGIN = 6 * MIB  # beside the budget: tables of the runtime, scratch of its kernels, what Python takes for the answer


def status_bytes(key: str, pid: int | str = "self") -> int:
    """VmRSS, VmHWM, VmData; 0 where they cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def memory_left() -> int:
    """Bytes that are free, or would be on demand, within the machine, the cgroups around us and our own limits."""
    left = []
    for line in _lines(Path("/proc/meminfo")):
        if line[0] == "MemAvailable:":
            left.append(int(line[1]) * 1024)
    for line in _lines(Path("/proc/self/cgroup")):
        if line[0].startswith("0::"):
            group = CGROUPS / line[0][3:].strip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(CGROUPS):
                    break
                most, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
                if most is not None and used is not None:
                    idle = sum(int(one[1]) for one in _lines(folder / "memory.stat") if one[0] == "inactive_file")
                    left.append(most - used + idle)
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            left.append(soft)
    return max(MIB, min(left, default=64 * MIB) // MIB * MIB)


def _lines(file: Path) -> Iterator[list[str]]:
    try:
        text = file.read_text()
    except OSError:
        return
    yield from (line.split() for line in text.splitlines() if line.strip())


def _number(file: Path) -> int | None:
    return next((int(words[0]) for words in _lines(file) if words[0].isdigit()), None)


@contextmanager
def limited(budget: int | None) -> Iterator[None]:
    """Within it this process may take so many bytes, and the margin, on top of what it holds now: RLIMIT_DATA counts
    private writable memory. None, or elsewhere than on Linux: no limit. Only the soft value is set."""
    if budget is None or sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    cap = status_bytes("VmData") + budget + MARGIN
    for other in before:
        cap = cap if other == resource.RLIM_INFINITY else min(cap, other)
    resource.setrlimit(resource.RLIMIT_DATA, (cap, before[1]))
    try:
        yield
    except MemoryError:
        raise OutOfMemory(f"the task needs more than this device's budget of {budget} bytes") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
