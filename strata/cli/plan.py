"""`strata plan`: a model and a budget to the steps of Successive Layer Training."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.flags import add_flags, given
from strata.core.sizes import at_least_one, parse_shape, show_bytes
from strata.execution.execution import Execution
from strata.planning import PlanInfeasible
from strata.runs.config import RunConfig, refuse_without_needed

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
# Of a run's settings, those that a plan looks at beside the execution, by the keyword of `strata.plan`.
PLANNED = {
    "constraints": "constraint",
    "budgets": "budget",
    "rounds": "rounds",
    "accounting": "accounting",
    "schedule": "schedule",
    "patience": "patience",
    "head_fraction": "head_fraction",
}


def planned() -> list[str]:
    """Keys of the settings that a plan looks at."""
    return [key for key, one in RunConfig.described().items() if one.part == "execution" or key in PLANNED]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="which layers train in which rounds, within a memory budget",
        description="Lay out the steps of Successive Layer Training for a model and a memory budget per device.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig, only=("model", *planned()))
    group = parser.add_argument_group("what the model takes and gives")
    group.add_argument("--classes", metavar="N", help="number of classes (default 10, or what the callable chooses)")
    group.add_argument("--input", default="3x32x32", metavar="CxHxW", help="input shape, no batch (default 3x32x32)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    output.add_argument("--picture", metavar="FILE", help="draw layers over rounds, and memory: a .png, .svg or .pdf")
    output.add_argument("--verify", action="store_true", help="really train a step of every configuration; measure it")
    output.add_argument(
        "--hard-cap",
        action="store_true",
        help="verify under a kernel limit: every configuration has to live, the whole model to die",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    settings = plan_settings(args)
    name = args.model or RunConfig.described()["model"].default
    shape = parse_shape(args.input)
    classes = None if args.classes is None else at_least_one(args.classes, "--classes")
    picture_format(args.picture)

    from strata.planning.runtime import runtime_bytes, start_measuring, stop_measuring

    runtime = None if args.json else start_measuring()  # in the background: it loads torch while we do
    try:
        from strata.graph import ChannelGraph  # torch: only once everything above has been read
        from strata.models.loading import load_model
        from strata.planning.make import plan

        graph = ChannelGraph(load_model(name, classes, shape), input_shape=shape)
        if classes is not None and graph.classes != classes:
            raise BadInput(f"--classes is {classes}, but {name} has {graph.classes} outputs")
        found = plan(graph, name=name, **settings)
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

        trials = verify(found, name, classes, args.hard_cap)
        seen = list(trials) if args.json else show_trials(found, trials, args.hard_cap)
        true = all(trial.holds for trial in seen)
        answer["verification"] = [trial.to_json() for trial in seen]
    if args.json:
        print(json.dumps(answer, indent=2))
    return 0 if true else 1


def plan_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `strata.plan` that the options mean, checked."""
    asked = given(argparse.Namespace(**{key: getattr(args, key) for key in planned()}), RunConfig)
    if ("constraints" in asked) == ("budgets" in asked):
        raise BadInput("give either --constraint, such as 0.25, or --budget, such as 24MiB")
    described = RunConfig.described()
    refuse_without_needed(asked, described)
    settings = {PLANNED[key]: value for key, value in asked.items() if key in PLANNED}
    execution = {described[key].name: value for key, value in asked.items() if key not in PLANNED}
    return {**settings, "execution": Execution(**execution)} if execution else settings


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
