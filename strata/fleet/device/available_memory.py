"""What memory this system allows, and has left: by the machine, the cgroups around this process, its own limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from strata.core.processes import status_bytes

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
MIB = 2**20


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes: the smallest of all limits that apply."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits += [limit for limit, _ in _cgroups(cgroups, membership)]
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def memory_left(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO) -> int:
    """Bytes that are free, or would be on demand, within all limits that apply."""
    left = [limit - used for limit, used in _cgroups(cgroups, membership)]
    left += [kib * 1024 for kib in _numbers(meminfo, "MemAvailable:")]
    return max(0, min(left, default=memory_limit(cgroups, membership)))


def _cgroups(cgroups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of this process's group and those around it, by cgroups of version 2 or 1, where there is a limit.

    Pages of files that nobody has touched for a while do not count as used: the kernel gives them back on demand.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, idle = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            # the top group has no such file; a container sees only its own part of the tree
            for most in _numbers(folder / limit):
                used = sum(_numbers(folder / usage)) - sum(_numbers(folder / "memory.stat", idle))
                yield most, max(0, used)


def _numbers(file: Path, key: str | None = None) -> list[int]:
    """The number that the file holds, or that stands after `key` in it; none where there is none (such as `max`)."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return []
    found = [words[1:] if key else words for words in lines if words and (key is None or words[0] == key)]
    return [int(words[0]) for words in found if words and words[0].isdigit()]


def resident_bytes_of(pid: int) -> int:
    """0 where it cannot be read."""
    try:
        return status_bytes("VmRSS", pid)
    except OSError:
        return 0


def budget_left(limit: int, held: int, left: int) -> int:
    """For tensors, when the runtime holds so much of the limit and so much is left: whole MiB, at least 1."""
    return max(MIB, min(limit - held, left) // MIB * MIB)
