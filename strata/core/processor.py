"""Which processor this is: it decides how sums are rounded, which kernels run and what they take."""

from __future__ import annotations

import contextlib
import platform
from functools import cache
from pathlib import Path


def processor_name() -> str:
    told = _cpuinfo()
    names = (told.get(key) for key in ("model name", "Model", "Hardware"))
    return next(filter(None, names), platform.processor() or platform.machine())


def processor_abilities() -> str:
    """The instructions it has, as the kernel lists them."""
    told = _cpuinfo()
    return " ".join(told[key] for key in ("flags", "Features", "CPU part") if key in told) or platform.machine()


@cache
def _cpuinfo() -> dict[str, str]:
    """What the kernel says of its first core, by name; nothing where it says nothing."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found
