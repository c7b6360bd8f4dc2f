"""How long a plan takes, once the model is exported, and how long the export takes.

    .venv/bin/python benchmarks/planning.py            a table
    .venv/bin/python benchmarks/planning.py --json     the same for programs

Limits (of the plan, not of the export): ResNet20 0.5 s, ResNet56 3 s, ConvNext and ViT of about 5 M parameters 10 s.
One thread. Each plan is made `--trials` times on the same graph and the fastest counts; nothing is kept between trials.
The exit code is 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from strata.graph import ChannelGraph
from strata.models import resnet20, resnet56
from strata.planning import PlanInfeasible
from strata.planning.make import plan


class Logits(nn.Module):
    """transformers' models return more than a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(image_size=64, hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 6, 2], num_labels=200)
    return Logits(ConvNextForImageClassification(config))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64, patch_size=8, hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
        intermediate_size=768, num_labels=200,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config))


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    side: int
    constraint: float
    limit: float  # seconds


CASES = (
    Case("resnet20", resnet20, 32, 0.25, 0.5),
    Case("resnet56", resnet56, 64, 0.25, 3.0),
    Case("convnext", convnext, 64, 0.5, 10.0),
    Case("vit", vit, 64, 0.5, 10.0),
)


@dataclass(frozen=True)
class Result:
    network: str
    parameters: int
    accounting: str
    constraint: float
    steps: int
    export_seconds: float
    plan_seconds: float  # on the wall
    cpu_seconds: float  # of this process, in the same trial: well below the wall's on a busy machine
    limit_seconds: float


def measure(case: Case, trials: int) -> list[Result]:
    model = case.make()
    parameters = sum(p.numel() for p in model.parameters())
    started = time.perf_counter()
    graph = ChannelGraph(model, input_shape=(3, case.side, case.side))
    export = time.perf_counter() - started
    results = []
    for accounting in ("paper", "peak"):
        seconds = []
        for _ in range(trials):
            started, used = time.perf_counter(), time.process_time()
            try:
                steps = len(plan(graph, constraint=case.constraint, rounds=2500, accounting=accounting).steps) - 1
            except PlanInfeasible:
                steps = 0
            seconds.append((time.perf_counter() - started, time.process_time() - used))
        results.append(
            Result(case.name, parameters, accounting, case.constraint, steps, export, *min(seconds), case.limit)
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [r for case in CASES if args.only in (None, case.name) for r in measure(case, args.trials)]
    where = {"machine": platform.machine(), "torch": torch.__version__, "load_average": round(os.getloadavg()[0], 1)}
    if args.json:
        print(json.dumps({**where, "results": [asdict(r) for r in results]}, indent=2))
    else:
        print("network     parameters accounting constraint steps   export     plan      cpu   limit")
        for r in results:
            print(
                f"{r.network:<10} {r.parameters:>11,} {r.accounting:>10} {r.constraint:>10} {r.steps or 'none':>5} "
                f"{r.export_seconds:>6.2f} s {r.plan_seconds:>6.3f} s {r.cpu_seconds:>6.3f} s {r.limit_seconds:>5.1f} s"
                f"{'' if r.plan_seconds < r.limit_seconds else '  over'}"
            )
        print(", ".join(f"{key} {value}" for key, value in where.items()))
    return int(any(r.plan_seconds >= r.limit_seconds for r in results))


if __name__ == "__main__":
    sys.exit(main())
