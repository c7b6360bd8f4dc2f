"""Where the time of training and evaluation goes: torch's profiler on the work that one worker process gets.

One thread, this process. Python and dispatch is what is left of the wall clock when the operators' own times are taken
away; it includes the profiler's own cost, so it is an upper bound.

    .venv/bin/python -m benchmarks.profile_round [--case 0.125] [--operators 20]
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import common, tables
from strata.federation.jobs import DeviceProgram, EvaluateJob, TrainJob
from strata.methods import Task
from strata.training import COHORT, cohorts

OTHER = "other operators"
OUTSIDE = "Python and dispatch"
KINDS = (  # the first that occurs in the operator's name
    (
        "convolution, backward",
        ("convolution_backward", "convolutionbackward", "conv_depthwise2d_backward", "winogradbackward"),
    ),
    ("convolution, forward", ("convolution", "conv2d", "winograd")),
    ("batch norm", ("batch_norm",)),
    ("linear and pooling", ("mm", "linear", "pool")),
    ("optimizer", ("sgd", "optimizer")),
    ("element-wise and sums", ("relu", "threshold", "aten::add", "mul", "div", "sub", "sum", "softmax", "nll", "loss")),
    (
        "copies and memory layout",
        ("copy", "clone", "contiguous", "index", "stack", "cat", "fill", "zero", "empty", "aten::to"),
    ),
)
CASES = ("1", "0.125", "slt-middle")


def kind_of(operator: str) -> str:
    lowered = operator.lower()
    return next((kind for kind, marks in KINDS if any(mark in lowered for mark in marks)), OTHER)


def training_work(case: str, size: common.Size) -> Callable[[], Any]:
    """A worker's share of a round: a cohort where the network is narrow, else a device."""
    program = DeviceProgram(common.model(), (3, 32, 32), common.data().train, {}, common.training())
    program.workspace, parts = common.workspace(), common.partition(size.samples)
    tasks = [Task(0, device, common.cut_of(case)) for device in range(min(COHORT, size.per_round))]
    jobs = [TrainJob(task, parts[task.device], common.LR, 0) for task in tasks]
    together = cohorts(common.workspace(), tasks, [size.samples] * len(tasks), program.training)[0]
    state = common.model().state_dict()
    if len(together) == 1:
        return lambda: program(jobs[0], state)
    return lambda: program._train_together([jobs[index] for index in together], state)


def evaluation_work(case: str, size: common.Size) -> Callable[[], Any]:
    data = common.data()
    program = DeviceProgram(common.model(), (3, 32, 32), data.train, {"test": data.test}, common.training())
    program.workspace = common.workspace()
    job = EvaluateJob(common.cut_of(case), 0, "test", "batch", (0,) if size is common.QUICK else (0, 1), 0)
    state = common.model().state_dict()
    return lambda: program(job, state)


def shares(work: Callable[[], Any]) -> tuple[dict[str, float], Sequence[Any], float]:
    """Per kind of operator the share of the wall clock, the profiler's averages, and the wall clock without it."""
    work()  # networks are built, peaks measured
    started = time.perf_counter()
    work()
    bare = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
    averages = profiler.key_averages()
    found: Counter[str] = Counter()
    for one in averages:
        found[kind_of(one.key)] += one.self_cpu_time_total / 1e6
    known = sum(found.values())
    ordered = {kind: found[kind] / seconds for kind in (*(kind for kind, _ in KINDS), OTHER)}
    return {**ordered, OUTSIDE: max(0.0, 1 - known / seconds)}, averages, bare


def measure(quick: bool, cases: Sequence[str] = CASES) -> dict[str, Any]:
    torch.set_num_threads(1)
    size, found = common.size(quick), []
    for case in cases:
        parts, _, seconds = shares(training_work(case, size))
        found.append({"case": case, "title": f"training, {common.title(case)}", "shares": parts, "seconds": seconds})
    parts, _, seconds = shares(evaluation_work(cases[-1], size))
    found.append({"case": cases[-1], "title": f"evaluation, {common.title(cases[-1])}", "shares": parts,
                  "seconds": seconds})  # fmt: skip
    return {"cases": found}


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=common.CASES)
    parser.add_argument("--operators", type=int, default=0, help="also this many operators by their own time")
    args = parser.parse_args()
    found = measure(args.quick, [args.case] if args.case else CASES)
    print(json.dumps(found) if args.json else tables.profile(found))
    if args.operators:
        for case in [args.case] if args.case else CASES:
            _, averages, _ = shares(training_work(case, common.size(args.quick)))
            print(f"\ntraining, {common.title(case)}")
            print(averages.table(sort_by="self_cpu_time_total", row_limit=args.operators))  # type: ignore[attr-defined]
    return 0


if __name__ == "__main__":
    sys.exit(main())
