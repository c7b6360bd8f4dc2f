"""What memory this system allows: of the machine, of the cgroups around this process, of its own limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MIB = 2**20


def memory_limit(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes: the smallest of all that apply."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits(cgroups, membership)]
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """memory.max (version 2) or memory.limit_in_bytes (version 1) of this process's group and those around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                text = (folder / file).read_text().strip()
            except OSError:  # the top group has no such file; a container sees only its own part of the tree
                continue
            if text.isdigit():
                yield int(text)


def resident_bytes_of(pid: int) -> int:
    """0 where it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def budget_left(limit: int, held: int) -> int:
    """For tensors, when the runtime holds so much: whole MiB, so that it is the same after a restart. At least 1."""
    return max(MIB, (limit - held) // MIB * MIB)
