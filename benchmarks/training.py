"""Samples per second in training: Strata, the plain loop, Flower's simulation, and the share of the machine's peak.

ResNet20, batch 32, rounds of 10 devices with 500 samples. Strata: the local engine with its default workers, from
sampling to the averaged model, without evaluation; medians over rounds after one that is not counted. The plain loop
(benchmarks/plain.py): one or two devices of that size, at torch's default threads and at the best of 1, 2 and default.

    .venv/bin/python -m benchmarks.training [--quick] [--json]
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

from benchmarks import common, flower, matmul, tables
from strata.engines import Engine
from strata.execution import flops
from strata.federation.rounds import RoundSettings, play
from strata.federation.state import FederationState
from strata.runs.config import RunOptions
from strata.runs.session import flops_of_tasks
from strata.runs.workers import make_engine
from strata.training import cohorts


def strata_rates(engine: Engine, case: str, size: common.Size) -> list[float]:
    """Samples per second of each measured round."""
    method, training = common.OneCut(common.graph(), common.cut_of(case)), common.training()
    state = FederationState(0, {name: value.clone() for name, value in common.model().state_dict().items()})
    counted = flops_of_tasks(method)
    rates = []
    for number in range(size.rounds + 1):
        settings = RoundSettings(
            RunOptions.of(devices=common.FLEET).simulated_fleet(),
            common.partition(size.samples if number else common.WARM_SAMPLES), size.per_round, size.per_round,
            lambda round: common.LR, 0,
            together=lambda jobs: cohorts(common.workspace(), [job.task for job in jobs],
                                          [len(job.samples) for job in jobs], training),
        )  # fmt: skip
        started = time.perf_counter()
        state, record = play(state, method, settings, engine, counted, log=print)
        seconds = time.perf_counter() - started
        if record["dropped"]:
            raise RuntimeError(f"devices failed in the benchmark: {record['dropped']}")
        if number:
            rates.append(size.per_round * size.samples / seconds)
    return rates


def plain_rates(case: str, quick: bool) -> dict[str, Any]:
    """By default and at the best number of threads, each in a process of its own."""
    arguments = ["--case", case, *(["--quick"] if quick else [])]
    default = common.child("benchmarks.plain", *arguments, "--devices", "1")  # slow: one device is enough
    tried = {default["threads"]: default["samples_per_second"]}
    for threads in {1, min(2, common.cores())} - set(tried):
        tried[threads] = common.child("benchmarks.plain", *arguments, "--threads", str(threads))["samples_per_second"]
    best = max(tried, key=lambda threads: tried[threads])
    return {"default": default["samples_per_second"], "default_threads": default["threads"], "best": tried[best],
            "best_threads": best}  # fmt: skip


def measure(quick: bool) -> dict[str, Any]:
    size, training = common.size(quick), common.training()
    peak = matmul.measure(quick)
    engine = make_engine(common.model(), common.data(), training)
    try:
        ours = {case: strata_rates(engine, case, size) for case in size.cases}
    finally:
        engine.close()
    simulated = _flower(quick)
    cases = []
    for case in size.cases:
        plain = plain_rates(case, quick)
        rate, work = median(ours[case]), flops(common.graph(), common.cut_of(case)).train
        rates = simulated.get("samples_per_second", {}).get(case)
        theirs = median(rates) if rates else None
        cases.append({
            "case": case, "title": common.title(case), "flops_per_sample": work, "strata": rate,
            "strata_rounds": ours[case], "plain_default": plain["default"], "plain_best": plain["best"],
            "plain_default_threads": plain["default_threads"], "plain_best_threads": plain["best_threads"],
            "flower": theirs, "over_plain_default": rate / plain["default"], "over_plain_best": rate / plain["best"],
            "over_flower": rate / theirs if theirs else None,
            "share_of_peak": rate * work / peak["all_cores_gflops"] / 1e9,
        })  # fmt: skip
    return {"peak": peak, "flower": simulated, "cases": cases}


def _flower(quick: bool) -> dict[str, Any]:
    """Flower is not ours: what goes wrong there is reported and the rest goes on."""
    if not flower.is_installed():
        return {"status": "not installed"}
    try:
        found: dict[str, Any] = common.child("benchmarks.flower", *(["--quick"] if quick else []), timeout=400)
    except Exception as error:
        return {"status": f"failed: {str(error)[-500:]}"}
    return found


def main() -> int:
    args = common.parser(__doc__).parse_args()
    found = measure(args.quick)
    print(json.dumps(found) if args.json else tables.training(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
