"""`strata experiment NAME`: a table or figure of the paper, run here and shown beside the published numbers."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.core.flags import add_flags, given, split_list
from strata.core.sizes import at_least_one, parse_ratio
from strata.runs.config import RunConfig

if TYPE_CHECKING:
    from strata.experiments import Experiment, PlannedRun, Results
    from strata.experiments.estimates import Estimate

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata experiment list
  strata experiment table-iid --scale 0.06 --only 'cifar10/*' --dry-run
  strata experiment table-iid --scale 0.06 --only 'cifar10/*/0.125/*' --seeds 1 --data-dir DIR
  strata experiment table-iid --render
  strata experiment table-digits --scale 0.1 --seeds 1
"""
DEFAULT_OUT = "runs/experiments"
VARIED = ("schedule", "fill", "averaging", "variant", "weight_decay", "augmentation")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "experiment",
        help="a table or figure of the paper, beside the published numbers",
        description="Train the runs of a table or figure of the paper and show them beside the published numbers. The "
        "same command again keeps finished runs and resumes unfinished ones; experiments with the same --out share "
        "the runs they have in common.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="`list` shows them all")
    which = parser.add_argument_group("which runs")
    which.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="only runs whose name (data/model/distribution/constraint/method, see --dry-run) contains this, or "
        "matches it where it has * or ?; several, or a comma list: any of them",
    )
    which.add_argument(
        "--seeds", metavar="N", help="runs of each, seeds 0 to N-1 (default 3; with --render all there are)"
    )
    which.add_argument(
        "--scale",
        metavar="S",
        help="share of the paper's rounds, the learning rate's curve and the steps compressed to fit (default 1; with "
        "--render every length there is, each by itself)",
    )
    which.add_argument("--evaluations", default="100", metavar="N", help="of each run, evenly spread (default 100)")
    add_flags(parser, RunConfig, only=VARIED, title="settings other than the paper's: such runs are kept apart")
    how = parser.add_argument_group("how")
    how.add_argument("--data-dir", metavar="DIR", help="where the data sets are (default as in `strata data`)")
    how.add_argument("--out", default=DEFAULT_OUT, metavar="DIR", help=f"runs and results (default {DEFAULT_OUT})")
    how.add_argument("--jobs", default="1", metavar="N", help="runs at a time (default 1)")
    how.add_argument("--workers", type=int, metavar="N", help="processes of each run (default: cores / jobs)")
    how.add_argument("--checkpoint-every", default="1", metavar="N", help="rounds (default 1)")
    how.add_argument("--dry-run", action="store_true", help="list runs, settings and estimates; needs no data")
    how.add_argument("--render", action="store_true", help="only make tables and figures from finished runs")
    how.add_argument("--no-calibration", action="store_true", help="FLOPs only, no estimate of time (quicker)")
    how.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    how.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from strata.experiments import Asked, Results, experiment

    if args.dry_run and args.render:
        raise BadInput("give either --dry-run or --render, not both")
    if args.name == "list":
        return _list(args.json)
    scale = None if args.scale is None else parse_ratio(args.scale, "the scale")
    jobs, every = at_least_one(args.jobs, "--jobs"), at_least_one(args.checkpoint_every, "--checkpoint-every")
    if args.workers is not None and args.workers < 0:
        raise BadInput(f"workers are 0 (all in the run's own process) or more, not {args.workers}")
    seeds = None if args.seeds is None else at_least_one(args.seeds, "--seeds")
    evaluations = at_least_one(args.evaluations, "--evaluations")
    settings = tuple(given(args, RunConfig, only=VARIED).items())
    asked = Asked(scale or 1.0, seeds or 3, args.data_dir, evaluations, settings)
    chosen = experiment(args.name, asked)
    runs = select(chosen.runs, split_list(args.only))
    out = Path(args.out)
    if args.dry_run:
        return _dry_run(chosen, runs, args)
    failed = 0
    if runs and not args.render:
        failed = _carry_out(runs, out / "runs", jobs, every, args)
    exact = None if args.render and scale is None else {run.cell.name: run.request.course.rounds for run in chosen.runs}
    results = Results(out / "runs", exact, asked=asked)
    if args.render:  # after a run the table shows all that is there: runs may have been made in parts
        results = replace(results, cells=frozenset(run.cell.name for run in runs), seeds=seeds)
    files = render(chosen, results, out / chosen.name)
    if args.json:
        print(json.dumps({"experiment": chosen.name, "failed": failed, "files": [str(path) for path in files]}))
    else:
        print((out / chosen.name / "table.md").read_text(encoding="utf-8"))
        print("\n".join(f"written: {path}" for path in files))
    return 1 if failed else 0


def select(runs: Sequence[PlannedRun], patterns: Sequence[str]) -> list[PlannedRun]:
    """Those that any pattern fits; all without patterns."""
    if not patterns:
        return list(runs)

    def fits(name: str, pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, f"*{pattern}*") if set("*?[") & set(pattern) else pattern in name

    # a slash before the name, so that /cifar10/ can be told from cifar100
    found = [run for run in runs if any(fits("/" + run.name, pattern) for pattern in patterns)]
    if not found and runs:
        raise BadInput(f"no run fits --only {','.join(patterns)}: they are named like {runs[0].name}")
    return found


def render(chosen: Experiment, results: Results, folder: Path) -> list[Path]:
    from strata.core.files import said_plainly

    with said_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return chosen.render(results, folder)


def _list(as_json: bool) -> int:
    from strata.experiments import EXPERIMENTS, experiment

    every = [experiment(name) for name in EXPERIMENTS]
    if as_json:
        print(json.dumps([{"name": one.name, "title": one.title, "runs": len(one.runs)} for one in every], indent=2))
    else:
        for one in every:
            print(f"{one.name:<26} {len(one.runs):>4} runs  {one.title}")
    return 0


def _workers(args: argparse.Namespace, jobs: int) -> int:
    from strata.engines import default_workers

    if args.workers is not None:
        return int(args.workers)
    each = default_workers() // jobs
    return each if each > 1 else 0  # a single worker is no quicker than the run's own process


def _cores_used(args: argparse.Namespace, jobs: int, runs: int) -> int:
    from strata.engines import default_workers

    return max(1, min(default_workers(), min(jobs, runs) * max(1, _workers(args, jobs))))


def _dry_run(chosen: Experiment, runs: Sequence[PlannedRun], args: argparse.Namespace) -> int:
    from strata.experiments.estimates import Estimator
    from strata.runs.progress import duration

    jobs = at_least_one(args.jobs, "--jobs")
    estimator = Estimator(calibrate=not args.no_calibration)
    cores = _cores_used(args, jobs, len(runs))
    if args.json:
        values = [
            {
                "name": run.name,
                "request": run.request.to_json(),
                "train_flops": estimate.train_flops,
                "evaluation_flops": estimate.forward_flops,
                "core_seconds": estimate.seconds,
            }
            for run, estimate in ((run, estimator.of(run)) for run in runs)
        ]
        print(json.dumps({"experiment": chosen.name, "cores": cores, "runs": values}, indent=2))
        return 0
    print(f"{chosen.name}: {chosen.title}")
    for run in runs:
        fleet, bn, estimate = run.request.fleet, run.request.evaluation.bn, estimator.of(run)
        options = "".join(f" {key}={value}" for key, value in run.cell.options)
        time = "" if estimate.seconds is None else f"  {duration(estimate.seconds / cores)}"
        print(
            f"{run.name}  devices {fleet.per_round}/{fleet.devices}  bn {bn}{options}  "
            f"{estimate.flops / 1e12:.3g} TFLOP{time}",
            flush=True,
        )
    print(_total([estimator.of(run) for run in runs], len(runs), cores))
    return 0


def _total(estimates: Sequence[Estimate], runs: int, cores: int) -> str:
    from strata.runs.progress import duration

    work = f"{runs} runs, {sum(estimate.flops for estimate in estimates) / 1e12:.4g} TFLOP"
    seconds = [estimate.seconds for estimate in estimates if estimate.seconds is not None]
    if not runs or len(seconds) < len(estimates):
        return work
    return f"{work}, about {duration(sum(seconds) / cores)} on {cores} cores (h:mm:ss, at the speed just measured)"


def _carry_out(runs: Sequence[PlannedRun], root: Path, jobs: int, every: int, args: argparse.Namespace) -> int:
    """The number of runs that failed."""
    from strata.experiments.estimates import Estimator
    from strata.experiments.progress import Overview
    from strata.experiments.running import carry_out, check_data, unfinished

    todo = unfinished(runs, root)
    check_data(todo)
    if not todo:
        return 0
    if not args.quiet and not args.no_calibration:
        print("measuring the speed of this machine...", file=sys.stderr, flush=True)
    estimator = Estimator(calibrate=not args.no_calibration)
    estimates = {run.name: estimator.of(run) for run in todo}
    if not args.quiet:
        print(_total(list(estimates.values()), len(todo), _cores_used(args, jobs, len(todo))), file=sys.stderr)
    weights = {name: one.flops if one.seconds is None else one.seconds for name, one in estimates.items()}
    overview = Overview(weights, len(runs) - len(todo), args.quiet)
    failures = carry_out(todo, root, jobs=jobs, workers=_workers(args, jobs), checkpoint_every=every, overview=overview)
    for failure in failures:
        print(f"strata experiment: {failure.run.name} failed: {failure.reason}", file=sys.stderr)
    return len(failures)
