"""The server's memory and the time of a round for fleets of 100, 10,000 and 100,000 devices, ten of them a round.

A tiny network and the lazy partition, so that what shows is the loop and not the training. Memory is the resident set
of the main process (torch and the data included), its highest while the rounds ran; each fleet has its own process.

    .venv/bin/python -m benchmarks.fleet [--quick] [--json]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import strata
from benchmarks import common, tables
from strata.data import FederatedData, ImageSet
from strata.data.partitions import LazyIid
from strata.graph import ChannelGraph
from strata.methods import FedAvg

DEVICES = (100, 10_000, 100_000)
SAMPLES = 64


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def one_fleet(devices: int, rounds: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    train, test = (
        ImageSet(
            torch.randint(0, 256, (count, 3, 8, 8), generator=draw, dtype=torch.uint8),
            torch.randint(0, 10, (count,), generator=draw),
        )
        for count in (10_000, 1_000)
    )
    data, model = FederatedData(train, test, "random images", 10), Tiny()
    method = FedAvg(ChannelGraph(model, data.input_shape))
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        result = strata.run(
            model, data, method, out=Path(scratch) / "run", rounds=rounds, per_round=10, progress=False,
            partition=LazyIid(len(train), devices, SAMPLES, seed=0), eval_every=rounds,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        per_round = [record["seconds"] for record in result.metrics[1:-1]]  # neither start-up nor evaluation
    return {
        "devices": devices, "rounds": rounds, "round_seconds": median(per_round), "run_seconds": seconds,
        "server_mib": peak_kib() / 1024,
    }  # fmt: skip


def peak_kib() -> int:
    """Of this program alone: getrusage would give the parent's where that was larger."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure(quick: bool) -> dict[str, Any]:
    flags = ["--quick"] if quick else []
    fleets = [common.child("benchmarks.fleet", *flags, "--devices", str(devices)) for devices in DEVICES]
    return {"per_round": 10, "samples": SAMPLES, "fleets": fleets}


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, help="only this fleet, in this process")
    args = parser.parse_args()
    if args.devices:
        print(json.dumps(one_fleet(args.devices, 6 if args.quick else 60)))
        return 0
    found = measure(args.quick)
    print(json.dumps(found) if args.json else tables.fleet(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
