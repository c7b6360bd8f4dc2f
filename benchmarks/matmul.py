"""What the machine can do at most: GFLOP/s of a float32 matrix product on one thread, times the cores.

Run: .venv/bin/python -m benchmarks.matmul
"""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks import common

SIDE = 2048


def gflops(seconds: float) -> float:
    """The best of as many products as fit in this time, on one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    result = torch.empty(SIDE, SIDE)
    torch.mm(a, b, out=result)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(a, b, out=result)
        best = min(best, time.perf_counter() - started)
    return 2 * SIDE**3 / best / 1e9


def measure(quick: bool) -> dict[str, float]:
    one = gflops(0.5 if quick else 4.0)
    return {"one_core_gflops": one, "cores": common.cores(), "all_cores_gflops": one * common.cores()}


def main() -> int:
    args = common.parser(__doc__).parse_args()
    found = measure(args.quick)
    one, all_cores = found["one_core_gflops"], found["all_cores_gflops"]
    print(json.dumps(found) if args.json else f"one core {one:.0f} GFLOP/s, all {found['cores']} {all_cores:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
