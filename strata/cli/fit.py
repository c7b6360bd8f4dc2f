"""`strata fit`: what fits a budget, what each way costs, and which one to take."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cli.plan import INPUT_HELP, VOCABULARY_HELP, picture_format
from strata.core.errors import BadInput, Infeasible
from strata.core.flags import add_flags, flags_of, given
from strata.core.sizes import at_least_one, parse_input
from strata.planning.device_time import SAMPLES, add_speed_flags, speed_of
from strata.runs.config import RunConfig, warmup_of

if TYPE_CHECKING:
    from strata.data import FederatedData
    from strata.graph import ChannelGraph
    from strata.planning.fit import Fit, Way

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata fit --model resnet20 --budget 6.5MiB
  strata fit --model resnet20 --budget 2MiB,8MiB --gflops 2 --mbit 5 --picture fit.png
  strata fit --model mypkg.nets:make_net --budget 48MiB --data cifar10 --data-dir DIR --pilot 5
"""
# Of a run's settings, those that a fit looks at; its commands hand them on.
LOOKED_AT = (
    "model", "init", "data", "data_dir", "partition", "sizes", "budgets", "max_flops", "max_upload", "norm_samples",
    "width", "rounds", "warmup", "fixed_after", "devices", "per_round", "epochs", "seed",
    *RunConfig.keys_of("execution", "reading"),
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="every way to train a model within a budget, what it costs, and which one to take",
        description="Give every method its best setting within a memory budget per device, by the cheapest execution "
        "that fits, and say which to take. The rule is in docs/fit.md.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig, only=LOOKED_AT)
    group = parser.add_argument_group("what the model takes and gives (without --data)")
    group.add_argument("--classes", metavar="N", help="number of classes (default 10, or what the callable chooses)")
    group.add_argument("--vocabulary", metavar="N", help=VOCABULARY_HELP)
    group.add_argument("--input", metavar="CxHxW", help=INPUT_HELP)
    group.add_argument("--samples", metavar="N", help=f"training samples of a device (default {SAMPLES})")
    time = parser.add_argument_group("time (without these: on this machine, by a short calibration)")
    add_speed_flags(time)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--pilot", metavar="R", help="train each way for R rounds on --data, and say how accurate it is"
    )
    output.add_argument("--picture", metavar="FILE", help="draw bytes against cost: a .png, .svg or .pdf")
    output.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    asked = given(argparse.Namespace(**{key: getattr(args, key) for key in LOOKED_AT}), RunConfig)
    if "budgets" not in asked:
        raise BadInput("give what a device can hold: --budget, such as 6.5MiB")
    if args.pilot is not None and "data" not in asked:
        raise BadInput("a pilot trains, so it needs data: give --data, such as digits or cifar10")
    if "data" in asked and (args.input or args.classes or args.vocabulary or args.samples):
        raise BadInput(
            "the data says what the model takes and how many samples there are: leave out --input, --classes, "
            "--vocabulary and --samples"
        )
    pilot = None if args.pilot is None else at_least_one(args.pilot, "--pilot")
    speed = speed_of(args)
    picture_format(args.picture)
    config = RunConfig.of(**asked, lean=True)
    if "warmup" not in asked:
        config = config.changed(warmup=warmup_of(config.course.rounds))
    say("loading torch and the model")
    found = fit_of(config, args, speed)
    if pilot is not None and found.recommended is not None:
        found = piloted(found, config, pilot)
    if args.picture and found.recommended is not None:
        from strata.planning.fit_table import save_picture

        save_picture(found, args.picture)
        say(f"picture: {args.picture}")
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        show(found)
    if found.recommended is None:
        raise Infeasible(found.reason)
    return 0


def fit_of(config: RunConfig, args: argparse.Namespace, speed: Any) -> Fit:
    from strata.graph import ChannelGraph  # torch: only once everything above has been read
    from strata.graph.inputs import InputSpec, taken_by
    from strata.methods.fitting import fit
    from strata.models.loading import load_model, refuse_vocabulary
    from strata.runs.launch import make_model

    problem = config.problem
    data = load_data_of(config) if args.data is not None else None
    if data is None:
        inputs = parse_input(args.input or "3x32x32")
        shape = InputSpec.of(inputs).inputs[0].shape
        classes = None if args.classes is None else at_least_one(args.classes, "--classes")
        vocabulary = None if args.vocabulary is None else at_least_one(args.vocabulary, "--vocabulary")
        refuse_vocabulary(problem.model, vocabulary)
        task = config.reading.objective or "classification"
        model = load_model(problem.model, classes, shape, vocabulary, task)
        graph = ChannelGraph(model, inputs, width=config.approach.width)
        samples = SAMPLES if args.samples is None else at_least_one(args.samples, "--samples")
    else:
        model = make_model(config, data, with_weights=False)
        taken = data.only(taken_by(model, data.inputs.names)).inputs
        graph = ChannelGraph(model, taken, width=config.approach.width)
        samples = max(1, len(data.train) // config.fleet.devices)
    return fit(
        graph,
        [f"{size}B" for size in config.approach.budgets],
        rounds=config.course.rounds,
        execution=config.execution,
        max_flops=config.approach.max_flops,
        max_upload=None if config.approach.max_upload is None else f"{config.approach.max_upload}B",
        norm_samples=config.approach.norm_samples,
        gflops=None if speed is None else speed.gflops,
        mbit=None if speed is None else speed.mbit,
        devices=config.fleet.devices,
        per_round=config.fleet.per_round,
        samples=samples,
        epochs=config.local.epochs,
        name=problem.model,
        command=lambda way: command_of(config, way, None if data is not None else data_for(graph)),
        say=say,
        plain=model,
        pretrained=config.pretrained,
    )


def load_data_of(config: RunConfig) -> FederatedData:
    from strata.runs.launch import load_data

    return load_data(config)


def data_for(graph: ChannelGraph) -> str | None:
    """What stands for data in a command, where those that a run takes by itself are of another kind."""
    if any(not one.dtype.is_floating_point for one in graph.inputs.inputs):
        return "text:FILE.jsonl"
    return None if (graph.inputs.plain, graph.classes) == ((3, 32, 32), 10) else "DATA"


def command_of(config: RunConfig, way: Way, data: str | None = None) -> str:
    """What to paste. `data`: see data_for."""
    flags = flags_of(asked_of(config, way)) + ([] if data is None else ["--data", data])
    if "--method" not in flags:  # it is the default
        flags = ["--method", way.method, *flags]
    return shlex.join(["strata", "run", *flags, "--out", f"runs/{way.method}"])


def asked_of(config: RunConfig, way: Way) -> RunConfig:
    """The settings for this way: not every one runs frozen layers twice."""
    kept: dict[str, Any] = {} if way.execution.caches else {"cache_prefix": None}
    if way.norm_samples is not None:
        kept["norm_samples"] = way.norm_samples
    return config.changed(method=way.method, **kept)


def piloted(found: Fit, config: RunConfig, rounds: int) -> Fit:
    """With the accuracy of each way after so many rounds."""
    from strata.planning.fit import with_beaten
    from strata.runs.launch import Resources, launch

    ways = list(found.ways)
    resources = Resources()
    try:
        with tempfile.TemporaryDirectory(prefix="strata-pilot-") as folder:
            for number, way in enumerate(ways):
                if not way.fits:
                    continue
                say(f"pilot: {rounds} rounds of {way.method}")
                asked = asked_of(config, way).changed(rounds=rounds, warmup=min(config.course.warmup, rounds // 2))
                result = launch(asked, Path(folder) / way.method, progress=False, resources=resources)
                ways[number] = replace(way, accuracy=result.summary["accuracy"])
    finally:
        resources.close()
    return replace(found, ways=with_beaten(ways, found.recommended))


def say(text: str) -> None:
    print(f"strata fit: {text}", file=sys.stderr, flush=True)


def show(found: Fit) -> None:
    from rich.console import Console

    from strata.planning.fit_table import WIDTH

    console = Console(highlight=False)
    if not console.is_terminal or console.width < WIDTH:  # wrapped cells are harder to read than long lines
        console.width = WIDTH
    console.print(found, soft_wrap=False)
