"""Device work on a Ray cluster (the extra `ray`). Nothing here imports Ray until an engine is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.core.errors import BadInput


@dataclass(frozen=True)
class Ray:
    """Where the work goes, for strata.run(..., engine=Ray(...)). Never changes a result.

    `address`: of a running cluster, as HOST:PORT, or "auto" for the one this machine belongs to.
    None: a small cluster on this machine, which ends with the run.
    `gpus`: the share of a GPU that each worker reserves.
    """

    address: str | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        whole = math.isfinite(self.gpus) and float(self.gpus).is_integer()
        if not (0 <= self.gpus <= 1 or (self.gpus > 1 and whole)):
            raise BadInput(f"each worker's share of GPUs is from 0 to 1, or a whole number, not {self.gpus:g}")
        if self.address is not None and self.address != "auto":
            host_and_port(self.address)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(f"a Ray cluster's address is HOST:PORT (10.0.0.1:6379, for example) or auto, not {address!r}")
    return host.strip("[]"), int(port)


__all__ = ["Ray", "host_and_port"]
