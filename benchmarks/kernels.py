"""A training step by torch's convolutions and by our own (winograd.c), in turns, in CPU time on one thread.

ResNet20, batch 32: the whole model and late steps of SLT at 0.125; the shortest of several stretches of steps each.

    .venv/bin/python -m benchmarks.kernels [--quick] [--json]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks import common, tables
from strata.methods import Phase
from strata.training import kernels
from strata.training.trainer import Trainer

CASES = ("1", "slt-middle", "slt-last")
STEPS = 5  # in a stretch; one where it has to be quick


def measure(quick: bool) -> dict[str, Any]:
    """Milliseconds of a step per case, by torch's and by our own convolutions."""
    kernels.require()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {case: _steps(case, *((1, 1) if quick else (12, STEPS))) for case in CASES}
    finally:
        torch.set_num_threads(threads)


def _steps(case: str, stretches: int, steps: int) -> dict[str, float]:
    trainer = Trainer(common.workspace(), Phase(common.cut_of(case)), common.training(), common.LR)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    shortest = {"torch": float("inf"), "ours": float("inf")}
    for _ in range(stretches):
        for name in shortest:
            with kernels.own_convolutions(name == "ours"):
                trainer.step((images,), labels)
                started = time.process_time()
                for _ in range(steps):
                    trainer.step((images,), labels)
            shortest[name] = min(shortest[name], (time.process_time() - started) / steps * 1000)
    return shortest


def main() -> int:
    args = common.parser(__doc__).parse_args()
    found = measure(args.quick)
    rows = [
        (common.title(case), f"{one['torch']:.1f} ms", f"{one['ours']:.1f} ms", f"{one['torch'] / one['ours']:.2f}x")
        for case, one in found.items()
    ]
    print(json.dumps(found) if args.json else tables.table(("a step", "torch", "ours", "torch / ours"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
