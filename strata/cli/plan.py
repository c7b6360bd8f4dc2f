"""`strata plan`: a model and a budget to the steps of Successive Layer Training."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from strata.cli.arguments import (
    add_budget_arguments,
    add_model_arguments,
    at_least_one,
    budgets_of,
    constraints_of,
    input_shape_of,
    model_of,
    parse_ratio,
    show_bytes,
)
from strata.core.errors import BadInput
from strata.planning import SCHEDULES, PlanInfeasible
from strata.planning.schedules import DEFAULT_PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.planning import Plan
    from strata.planning.verify import Trial

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata plan --model resnet20 --classes 10 --input 3x32x32 --batch 32 --constraint 0.25 --rounds 2500
  strata plan --model mypkg.nets:make_net --input 3x224x224 --budget 512MiB --json
  strata plan --model resnet44 --classes 200 --input 3x64x64 --budget 200MiB --verify --hard-cap
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan", help="which layers train in which rounds, within a memory budget",
        description="Lay out the steps of Successive Layer Training for a model and a memory budget per device.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_model_arguments(parser)
    add_budget_arguments(parser)
    add_schedule_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    output.add_argument("--picture", metavar="FILE", help="draw layers over rounds, and memory: a .png, .svg or .pdf")
    output.add_argument("--verify", action="store_true", help="really train a step of every configuration; measure it")
    output.add_argument(
        "--hard-cap", action="store_true",
        help="verify under a kernel limit: every configuration has to live, the whole model to die",
    )  # fmt: skip
    parser.set_defaults(func=run)


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rounds")
    group.add_argument("--rounds", default="500", metavar="N", help="rounds of training (default 500)")
    group.add_argument(
        "--schedule", default="cumulative", choices=SCHEDULES, help="rounds per step (default cumulative)"
    )
    group.add_argument(
        "--patience", metavar="N",
        help=f"early-stopping: rounds without better accuracy before the next step (default {DEFAULT_PATIENCE})",
    )  # fmt: skip
    group.add_argument(
        "--head-fraction", default="1", metavar="F",
        help="ablation: use this share of each head width and freeze fewer layers instead (default 1)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    settings = plan_settings(args)
    shape = input_shape_of(args)
    picture_format(args.picture)

    from strata.graph import ChannelGraph  # torch: only once everything above has been read
    from strata.planning.make import plan
    from strata.planning.runtime import runtime_bytes, start_measuring, stop_measuring

    model = model_of(args)
    runtime = None if args.json else start_measuring()  # in the background, while the plan is made
    try:
        graph = ChannelGraph(model, input_shape=shape)
        if args.classes is not None and graph.classes != int(args.classes):
            raise BadInput(f"--classes is {args.classes}, but {args.model} has {graph.classes} outputs")
        found = plan(graph, name=args.model, **settings)
        if runtime is not None:
            show(found, runtime_bytes(runtime))
    except PlanInfeasible as error:
        if args.json:
            print(json.dumps(error.to_json(), indent=2))
        raise
    finally:
        if runtime is not None:
            stop_measuring(runtime)
    if args.picture:
        from strata.planning.picture import save_picture

        save_picture(found, args.picture)
        print(f"picture: {args.picture}", file=sys.stderr)
    answer = found.to_json()
    true = True
    if args.verify or args.hard_cap:
        from strata.planning.verify import verify

        trials = verify(found, args.model, None if args.classes is None else int(args.classes), args.hard_cap)
        seen = list(trials) if args.json else show_trials(found, trials, args.hard_cap)
        true = all(trial.holds for trial in seen)
        answer["verification"] = [trial.to_json() for trial in seen]
    if args.json:
        print(json.dumps(answer, indent=2))
    return 0 if true else 1


def plan_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `strata.plan` that the options mean, checked."""
    constraints, budgets = constraints_of(args), budgets_of(args)
    if bool(constraints) == bool(budgets):
        raise BadInput("give either --constraint, such as 0.25, or --budget, such as 24MiB")
    if args.patience is not None and args.schedule != "early-stopping":
        raise BadInput("--patience is for --schedule early-stopping: give that too, or leave it out")
    return {
        "batch_size": at_least_one(args.batch, "--batch"),
        "micro_batch": args.micro_batch,
        "constraint": constraints or None,
        "budget": budgets or None,
        "rounds": at_least_one(args.rounds, "--rounds"),
        "accounting": args.accounting,
        "schedule": args.schedule,
        "patience": DEFAULT_PATIENCE if args.patience is None else at_least_one(args.patience, "--patience"),
        "head_fraction": parse_ratio(args.head_fraction, "--head-fraction"),
    }


def picture_format(path: str | None) -> None:
    if path is not None and not path.lower().endswith((".png", ".svg", ".pdf")):
        raise BadInput(f"--picture is a .png, .svg or .pdf file, such as plan.png, not {path!r}")


def show(plan: Plan, runtime: int | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = 100
    console.print(plan)
    for pinned in plan.graph.pinned:
        console.print(f"Kept at full width, for want of a rule: {pinned}", markup=False)
    if runtime is None:
        console.print("What Python and torch themselves hold resident could not be measured here.")
    else:
        console.print(
            f"A whole device needs {show_bytes(plan.budget_bytes + runtime)}: the budget and the "
            f"{show_bytes(runtime)} that Python and torch hold resident (measured here)."
        )


def short_reason(error: str | None) -> str:
    """torch's long complaint about memory in a few words; anything else as it is."""
    asked = re.search(r"you tried to allocate (\d+) bytes", error or "")
    return f"the kernel refused it another {show_bytes(int(asked[1]))}" if asked else error or "no reason given"


def show_trials(plan: Plan, trials: Iterable[Trial], hard_cap: bool) -> list[Trial]:
    """A line for each as it ends."""
    from strata.planning.verify import margin_bytes

    print("\nOne real training step of every configuration, in a process of its own (peak: live tensor bytes):")
    under = "   under the cap" if hard_cap else ""
    print(f"{'':>6} {'predicted':>11} {'measured':>11} {'off by':>7} {'scratch':>11}{under}")
    seen = []
    for trial in trials:
        seen.append(trial)
        measured = "failed" if trial.measured_bytes is None else show_bytes(trial.measured_bytes)
        scratch = "" if trial.scratch_bytes is None else show_bytes(trial.scratch_bytes)
        off = "" if trial.difference is None else f"{trial.difference:+.1%}" if trial.difference else "exact"
        outcome = (
            "" if trial.lived is None else "   lives" if trial.lived else f"   dies: {short_reason(trial.died_of)}"
        )
        print(
            f"{trial.name:>6} {show_bytes(trial.predicted_bytes):>11} {measured:>11} {off:>7} {scratch:>11}{outcome}",
            flush=True,
        )
        if trial.error:
            print(f"       {trial.error}")
    if hard_cap and seen[0].cap_bytes is not None:
        margin = margin_bytes(plan)
        print(
            f"Cap (RLIMIT_DATA): what the process held before + budget {show_bytes(plan.budget_bytes)} + margin "
            f"{show_bytes(margin)} ({margin / plan.full_bytes:.0%} of the whole model's bytes), for step 0 "
            f"{show_bytes(seen[0].baseline_bytes or 0)} + {show_bytes(plan.budget_bytes + margin)}."
        )
        if plan.accounting == "paper":
            print("The paper's counting is not what a step really needs; --accounting peak plans for that.")
    return seen
