"""`strata plan`: a model and a budget to the steps of Successive Layer Training."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.flags import add_flags, given
from strata.core.sizes import at_least_one, parse_bytes, parse_input, several, show_bytes
from strata.execution.execution import Execution
from strata.planning import PlanInfeasible
from strata.planning.device_time import SAMPLES, add_speed_flags, speed_of, time_of
from strata.runs.components import DEFAULT_ROUNDS
from strata.runs.config import RunConfig
from strata.runs.unused import refuse_without_needed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.graph import ChannelGraph
    from strata.planning import Plan
    from strata.planning.verify import Claim, Trial

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata plan --model resnet20 --classes 10 --input 3x32x32 --batch 32 --constraint 0.25 --rounds 2500
  strata plan --model mypkg.nets:make_net --input 3x224x224 --budget 512MiB --json
  strata plan --model resnet20 --budget 24MiB --gflops 2 --mbit 5
  strata plan --model resnet20 --method window --budget 14MiB --lean --verify --hard-cap
  strata plan --model resnet44 --classes 200 --input 3x64x64 --budget 200MiB --verify --hard-cap
"""
INPUT_HELP = "input shape, no batch (default 3x32x32); others NAME:DTYPE:SHAPE, such as input_ids:int64:64"
VOCABULARY_HELP = "ids of text, for a callable with a parameter of this name (bytes have 257)"
# Of a run's settings, those that a plan looks at beside the execution, by the keyword of `strata.plan`.
PLANNED = {
    "constraints": "constraint",
    "budgets": "budget",
    "rounds": "rounds",
    "accounting": "accounting",
    "lean": "lean",
    "reserve": "reserve",
    "width": "width",
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
        description="Lay out the steps of Successive Layer Training, or of another method, for a model and a memory "
        "budget per device.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig, only=("model", "method", "rank", "targets", "objective", *planned()))
    group = parser.add_argument_group("what the model takes and gives")
    group.add_argument("--classes", metavar="N", help="number of classes (default 10, or what the callable chooses)")
    group.add_argument("--vocabulary", metavar="N", help=VOCABULARY_HELP)
    group.add_argument("--input", default="3x32x32", metavar="CxHxW", help=INPUT_HELP)
    device = parser.add_argument_group("a device's time")
    add_speed_flags(device)
    device.add_argument("--samples", metavar="N", help=f"that a device has, for its hours (default {SAMPLES})")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    output.add_argument("--picture", metavar="FILE", help="draw layers over rounds, and memory: a .png, .svg or .pdf")
    output.add_argument(
        "--scratch", action="store_true", help="measure what libraries take beside each step (once per machine)"
    )
    output.add_argument("--verify", action="store_true", help="really train a step of every configuration; measure it")
    output.add_argument(
        "--hard-cap",
        action="store_true",
        help="verify under a kernel limit: every configuration has to live, the whole model to die",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.method not in (None, "slt"):
        return run_method(args)
    settings = plan_settings(args)
    name = args.model or RunConfig.described()["model"].default
    inputs = parse_input(args.input)
    classes = None if args.classes is None else at_least_one(args.classes, "--classes")
    vocabulary = None if args.vocabulary is None else at_least_one(args.vocabulary, "--vocabulary")
    picture_format(args.picture)
    speed = speed_of(args)
    if args.samples is not None and speed is None:
        raise BadInput("--samples is for a device's hours: give --gflops and --mbit too, or leave it out")
    samples = SAMPLES if args.samples is None else at_least_one(args.samples, "--samples")

    from strata.cli import say_beginning
    from strata.planning.runtime import runtime_bytes, start_measuring, stop_measuring

    say_beginning("plan", f"loading torch and {name}, then looking for steps that fit")
    runtime = None if args.json else start_measuring()  # in the background: it loads torch while we do
    try:
        from strata.graph import ChannelGraph  # torch: only once everything above has been read
        from strata.graph.inputs import InputSpec
        from strata.models.loading import load_model, refuse_vocabulary
        from strata.planning.make import plan

        refuse_vocabulary(name, vocabulary)
        shape = InputSpec.of(inputs).inputs[0].shape
        model = load_model(name, classes, shape, vocabulary, args.objective or "classification")
        graph = ChannelGraph(model, inputs, width=args.width or "residual")
        if classes is not None and graph.classes != classes:
            raise BadInput(f"--classes is {classes}, but {name} has {graph.classes} outputs")
        found = plan(graph, name=name, **settings)
        scratch = scratch_of(found, measured=args.scratch or found.reserve is not None)
        if runtime is not None:
            show(found, runtime_bytes(runtime), scratch)
        taken = None if speed is None else time_of(found, speed, samples)
        if taken is not None and not args.json:
            print(taken)
    except PlanInfeasible as error:
        if args.json:
            print(json.dumps(error.to_json(), indent=2))
        else:
            say_what_fits(error, graph, settings)
        raise
    finally:
        if runtime is not None:
            stop_measuring(runtime)
    if args.picture:
        from strata.planning.picture import save_picture

        save_picture(found, args.picture)
        print(f"picture: {args.picture}", file=sys.stderr)
    answer = found.to_json()
    if scratch is not None and (args.scratch or found.reserve is not None):  # not where it happens to be known
        answer["scratch_bytes"] = scratch
    if taken is not None:
        answer["device_time"] = taken.to_json()
    true = True
    if args.verify or args.hard_cap:
        from strata.planning.verify import claim_of, verify

        trials = verify(found, name, classes, args.hard_cap, args.objective, vocabulary)
        seen = list(trials) if args.json else show_trials(claim_of(found), trials, args.hard_cap)
        if found.accounting == "paper" and args.hard_cap and not args.json:
            print("The paper's counting is not what a step really needs; --accounting peak plans for that.")
        true = all(trial.holds for trial in seen)
        answer["verification"] = [trial.to_json() for trial in seen]
    if args.json:
        print(json.dumps(answer, indent=2))
    return 0 if true else 1


def run_method(args: argparse.Namespace) -> int:
    """What devices of another method than SLT train in which rounds."""
    keys = ("model", "method", "rank", "targets", *planned())
    asked = given(argparse.Namespace(**{key: getattr(args, key) for key in keys}), RunConfig)
    only_slt = ("picture", "scratch", "gflops", "mbit", "samples")
    used = [key for key in only_slt if getattr(args, key)]
    if used:
        raise BadInput(f"--{used[0].replace('_', '-')} is for a plan of slt, not of {args.method}: leave it out")

    from strata.cli import say_beginning

    say_beginning("plan", f"loading torch and the model, then looking for what {args.method} can train")
    from strata.federation.norm_statistics import check_norms
    from strata.graph import ChannelGraph, InputSpec  # torch: only once everything above has been read
    from strata.methods import method_class
    from strata.methods.heads import prepared_model
    from strata.methods.outline import configurations, outline
    from strata.models.loading import load_model, refuse_vocabulary
    from strata.runs.launch import make_method, own_options
    from strata.runs.running import settled
    from strata.runs.unused import refuse_unused
    from strata.training import LocalTraining

    refuse_unused(asked, [args.method])
    config = RunConfig.of(**asked)
    config.check()
    budgets = config.approach.budgets
    if args.hard_cap and not budgets:
        raise BadInput("--hard-cap is a limit: say with --budget how many bytes a device has, such as 24MiB")
    if (args.verify or args.hard_cap) and len(set(budgets)) > 1:
        raise BadInput("--verify and --hard-cap take one --budget: ask for each kind of device by itself")
    asked_inputs = parse_input(args.input)
    classes = None if args.classes is None else at_least_one(args.classes, "--classes")
    vocabulary = None if args.vocabulary is None else at_least_one(args.vocabulary, "--vocabulary")
    refuse_vocabulary(config.problem.model, vocabulary)
    shape, task = InputSpec.of(asked_inputs).inputs[0].shape, args.objective or "classification"
    model = load_model(config.problem.model, classes, shape, vocabulary, task)
    inputs = InputSpec.of(asked_inputs, model)
    model = prepared_model(method_class(args.method), model, inputs, config.course.seed, own_options(config))
    made = make_method(config, ChannelGraph(model, inputs, width=config.approach.width))
    fixed = LocalTraining(norm_statistics=config.execution.norm_statistics)
    check_norms(made, settled(fixed, config.course.rounds), config.course.rounds, config.problem.model)
    budget = min(budgets, default=None)
    found = outline(made, config.counted, config.course.rounds, config.problem.model, budget)
    answer, true = found.to_json(), True
    if not args.json:
        print(found)
    if args.verify or args.hard_cap:
        from strata.planning.verify import Claim, request_of, trials_of

        claim = Claim(found.budget_bytes or max(stage.memory_bytes for stage in found.stages), found.full_bytes)
        cap = claim if args.hard_cap else None
        request = {
            **request_of(made.graph, made.graph.inputs, config.problem.model, classes, args.objective, vocabulary),
            "method": args.method,
            "seed": config.course.seed,
            "options": own_options(config),
        }
        tried = configurations(made, config.counted, config.course.rounds, cap)
        trials = trials_of(tried, cap, request, "strata.methods.trials")
        seen = list(trials) if args.json else show_trials(claim, trials, args.hard_cap)
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


def say_what_fits(error: PlanInfeasible, graph: ChannelGraph, settings: dict[str, Any]) -> None:
    """In the refusal of a plan with these settings."""
    from strata.methods.budget import Budget
    from strata.methods.choice import name_ways

    sizes = tuple(map(parse_bytes, several(settings.get("budget"))))
    execution = settings.get("execution") or Execution()
    name_ways(error, graph, Budget(execution, sizes=sizes, rounds=settings.get("rounds", DEFAULT_ROUNDS)))


def picture_format(path: str | None) -> None:
    if path is not None and not path.lower().endswith((".png", ".svg", ".pdf")):
        raise BadInput(f"--picture is a .png, .svg or .pdf file, such as plan.png, not {path!r}")
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise BadInput(f"--picture goes into a folder that is there, and {Path(path).parent} is not: make it first")


def scratch_of(plan: Plan, measured: bool) -> list[int] | None:
    """Of each step. None where it is not known from before and not to be measured now."""
    from strata.execution.scratch import known_scratch, scratch_bytes

    steps = [(plan.graph, plan.cut(step.step), plan.execution_at(step.step)) for step in plan.steps]
    if measured:
        return [scratch_bytes(*step) for step in steps]
    known = [known_scratch(*step) for step in steps]
    found = [size for size in known if size is not None]
    return found if len(found) == len(known) else None


def show(plan: Plan, runtime: int | None, scratch: list[int] | None) -> None:
    from rich.console import Console

    from strata.planning.table import renderable

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = 100
    console.print(renderable(plan, console.width, scratch))
    if scratch is None and plan.accounting == "peak":
        console.print("What libraries take beside a step (scratch) is not known here yet: --scratch measures it.")
    for pinned in plan.graph.pinned:
        console.print(f"Kept at full width, for want of a rule: {pinned}", markup=False)
    if runtime is None:
        console.print("What Python and torch themselves hold resident could not be measured here.")
    else:
        console.print(
            f"A process that trains this holds {show_bytes(plan.budget_bytes + runtime)}: the budget and the "
            f"{show_bytes(runtime)} of Python and torch (resident, measured here). A device of a fleet runs Flower's "
            "processes beside it, and holds data: docs/fleet.md says what it needs in all."
        )


def short_reason(error: str | None) -> str:
    """torch's long complaint about memory in a few words; anything else as it is."""
    asked = re.search(r"you tried to allocate (\d+) bytes", error or "")
    return f"the kernel refused it another {show_bytes(int(asked[1]))}" if asked else error or "no reason given"


def summed_up(claim: Claim, trials: Iterable[Trial]) -> str:
    """What the trials have shown, in a sentence."""
    steps = [trial for trial in trials if trial.name != "whole"]
    measured = [trial for trial in steps if trial.measured_bytes is not None and trial.scratch_bytes is not None]
    if len(measured) < len(steps):
        return f"{len(steps) - len(measured)} of {len(steps)} steps could not be measured."
    tensors = max(trial.measured_bytes or 0 for trial in steps)
    scratch = max(trial.scratch_bytes or 0 for trial in steps)
    both = max((trial.measured_bytes or 0) + (trial.scratch_bytes or 0) for trial in steps)
    within = "within" if both <= claim.budget_bytes else f"{show_bytes(both - claim.budget_bytes)} above"
    died = [trial.name for trial in steps if trial.lived is False]
    lives = f"Under the cap step {', '.join(died)} died; every other" if died else "Every"
    return (
        f"{lives} step lives within {show_bytes(tensors)} of tensors and {show_bytes(scratch)} of library scratch; no "
        f"step takes more than {show_bytes(both)} of both together, {within} the budget of "
        f"{show_bytes(claim.budget_bytes)}."
    )


def show_trials(claim: Claim, trials: Iterable[Trial], hard_cap: bool) -> list[Trial]:
    """A line for each as it ends."""
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
    print(summed_up(claim, seen))
    if hard_cap and seen[0].cap_bytes is not None:
        margin = claim.margin_bytes
        print(
            f"Cap (RLIMIT_DATA): what the process held before + budget {show_bytes(claim.budget_bytes)} + margin "
            f"{show_bytes(margin)} ({margin / claim.full_bytes:.0%} of the whole model's bytes), for step 0 "
            f"{show_bytes(seen[0].baseline_bytes or 0)} + {show_bytes(claim.budget_bytes + margin)}."
        )
    return seen
