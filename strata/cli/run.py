"""`strata run`: train by one method; `strata run --resume DIR`: go on where it stopped."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.flags import add_flags, given
from strata.runs.config import RunConfig
from strata.runs.unused import refuse_unused, refuse_without_needed

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata run --data digits --method slt --constraint 0.125 --rounds 60 --devices 50 --out runs/a
  strata run --model resnet20 --data cifar10 --data-dir DIR --method slt --constraint 0.125 --rounds 500 --out runs/b
  strata run --resume runs/b
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "run",
        help="train by one method, or resume a run",
        description="Train a model over a fleet of devices into a run folder. A run can be stopped and resumed at any "
        "moment, to the same bits.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig)
    group = parser.add_argument_group("this run")
    group.add_argument("--out", metavar="DIR", help="the run folder: new or empty")
    group.add_argument("--resume", metavar="DIR", help="continue this run folder with its own settings")
    group.add_argument("--from-round", type=int, metavar="N", help="with --resume: go on after N rounds (--keep-every)")
    group.add_argument("--tensorboard", action="store_true", help="also log to DIR/tensorboard (an extra)")
    group.add_argument("--mlflow", action="store_true", help="also log to MLflow (an extra)")
    add_output_arguments(group)
    parser.set_defaults(func=run)


def add_output_arguments(group: Any) -> None:
    """What `run`, `compare` and `fleet run` share."""
    group.add_argument("--quiet", action="store_true", help="no progress")
    group.add_argument("--json", action="store_true", help="the summary as JSON on stdout")


def asked_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, once settings of the machine that nothing would look at are refused."""
    asked = given(args, RunConfig)
    of_machine = {key: value for key, value in asked.items() if key not in RunConfig.kept()}
    refuse_without_needed(of_machine, RunConfig.described())
    return asked


def run(args: argparse.Namespace) -> int:
    if (args.out is None) == (args.resume is None):
        raise BadInput("give either --out DIR for a new run or --resume DIR to continue one")
    if args.from_round is not None and args.resume is None:
        raise BadInput("--from-round says where a run is resumed: give --resume DIR too, or leave it out")
    asked = asked_of(args)
    if not args.quiet:
        from strata.cli import say_beginning

        say_beginning("run", f"loading torch, the model and the data, for {args.resume or args.out}")
    from strata.engines import EngineFailed  # torch: only once everything above has been read
    from strata.federation import RoundFailed
    from strata.runs.launch import launch
    from strata.runs.progress import summarise

    folder = Path(args.resume or args.out)
    if args.resume:
        config = RunConfig.of_folder(folder, asked)
    else:
        config = RunConfig.of(**asked)
        refuse_unused(asked, [config.approach.method])
    try:
        result = launch(
            config,
            folder,
            resume=args.resume is not None,
            from_round=args.from_round,
            progress=not args.quiet,
            tensorboard=args.tensorboard,
            mlflow=args.mlflow,
        )
    except (RoundFailed, EngineFailed) as error:
        print(f"strata run: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"out": str(result.out), **result.summary}, indent=2))
    else:
        summarise(result)
    return 0
