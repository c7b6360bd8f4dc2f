"""Whole rounds of SLT@0.125, with evaluation and checkpoint, against the plain loop; and what the loop itself costs.

Both sides evaluate the current submodel after every round: 10,000 images in batches of 1024, batch statistics (--bn
batch). A step of the plan is held still and a few of its rounds are run by strata.run; a round lasts from the start of
its training to the start of the next one's. The plain loop plays one round; training and evaluation each get the best
number of threads, tried on a little of both. It writes no checkpoint.

    .venv/bin/python -m benchmarks.rounds [--quick] [--json]
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

import strata
from benchmarks import common, plain, tables
from strata.engines import Engine, Outcome
from strata.federation.jobs import EvaluateJob
from strata.runs.workers import make_engine


class Enough(Exception):
    """All rounds are measured; the rest of the run, its final model, is not wanted."""


@dataclass
class Timed:
    """An engine that writes down when its work began and when its last answer came, and stops after some rounds."""

    engine: Engine
    rounds: int
    stopped: float = 0.0
    training: list[tuple[float, float]] = field(default_factory=list)
    evaluation: list[tuple[float, float]] = field(default_factory=list)

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        began = ended = time.perf_counter()
        if len(self.training) == self.rounds and not isinstance(jobs[0], EvaluateJob):
            self.stopped = began
            raise Enough
        for outcome in self.engine.run(jobs, state):
            ended = time.perf_counter()  # before the caller checks and adds: that is the loop's own time
            yield outcome
        (self.evaluation if isinstance(jobs[0], EvaluateJob) else self.training).append((began, ended))

    def close(self) -> None:
        self.engine.close()


def strata_rounds(case: str, size: common.Size) -> dict[str, float]:
    """Medians over the measured rounds, in seconds."""
    data, training = common.data(), common.training()
    if size.images < len(data.test):
        data = strata.data.FederatedData(
            data.train, data.test.subset(range(size.images)), data.name, data.classes, augmentation=data.augmentation
        )
    method = common.OneCut(common.graph(), common.cut_of(case))
    rounds = size.whole_rounds + 1  # the first is not counted
    engine = Timed(make_engine(common.model(), data, training), rounds)
    try:
        with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(Enough):
            strata.run(
                common.model(), data, method, out=Path(scratch) / "run", rounds=rounds + 1, training=training,
                partition=common.partition(size.samples), per_round=size.per_round, engine=engine, eval_every=1,
                bn="batch", progress=False, checkpoint_every=1,
            )  # fmt: skip
    finally:
        engine.close()
    starts = [*(began for began, _ in engine.training), engine.stopped]
    parts = [
        (starts[i + 1] - starts[i], _length(engine.training[i]), _length(engine.evaluation[i]))
        for i in range(1, rounds)
    ]
    whole, train, evaluate = (median(column) for column in zip(*parts, strict=True))
    outside = median((one - trained - evaluated) / one for one, trained, evaluated in parts)
    return {"seconds": whole, "train_seconds": train, "evaluate_seconds": evaluate, "outside_share": outside}


def plain_round(case: str, quick: bool, size: common.Size) -> dict[str, Any]:
    tries = {}
    for threads in sorted({1, min(2, common.cores()), common.cores()}):
        few = ["--devices", "1", "--samples", "64" if quick else "128", "--images", str(plain.EVALUATION_BATCH)]
        tries[threads] = common.child("benchmarks.plain", "--case", case, *few, "--threads", str(threads))
    train = min(tries, key=lambda threads: tries[threads]["train_seconds"])
    evaluate = min(tries, key=lambda threads: tries[threads]["evaluate_seconds"])
    work = ["--case", case, "--devices", str(size.per_round), "--samples", str(size.samples)]
    images = ["--images", str(size.images)]
    trained = common.child("benchmarks.plain", *work, *(images if train == evaluate else []), "--threads", str(train))
    evaluated = trained
    if train != evaluate:
        few = ["--case", case, "--devices", "1", "--samples", "32"]
        evaluated = common.child("benchmarks.plain", *few, *images, "--threads", str(evaluate))
    training_seconds = trained["train_seconds"] + trained["average_seconds"]
    return {
        "seconds": training_seconds + evaluated["evaluate_seconds"], "train_seconds": training_seconds,
        "evaluate_seconds": evaluated["evaluate_seconds"], "train_threads": train, "evaluate_threads": evaluate,
    }  # fmt: skip


def measure(quick: bool) -> dict[str, Any]:
    size = common.size(quick)
    cases = []
    for case in [case for case in size.cases if case in common.SLT_CASES]:
        ours, theirs = strata_rounds(case, size), plain_round(case, quick, size)
        cases.append({"case": case, "title": common.title(case), "strata": ours, "plain": theirs,
                      "over_plain": theirs["seconds"] / ours["seconds"]})  # fmt: skip
    totals = [sum(one[side]["seconds"] for one in cases) for side in ("plain", "strata")]
    return {"images": size.images, "cases": cases, "over_plain": totals[0] / totals[1],
            "outside_share": max(one["strata"]["outside_share"] for one in cases)}  # fmt: skip


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def main() -> int:
    args = common.parser(__doc__).parse_args()
    found = measure(args.quick)
    print(json.dumps(found) if args.json else tables.rounds(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
