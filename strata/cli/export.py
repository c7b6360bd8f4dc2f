"""`strata export`: steps of a plan as programs for devices without Python and torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.core.flags import add_flags, given
from strata.core.sizes import at_least_one, show_bytes
from strata.runs.config import RunConfig
from strata.runs.unused import refuse_unused

if TYPE_CHECKING:
    from strata.export.folder import Exported

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata export --model resnet20 --budget 6.5MiB --data digits --out pocket/ && pocket/pocket
  strata export --model resnet20 --method slt --constraint 0.25 --step 2 --verify --out pocket/
  strata export --run runs/a --out pocket/
"""
LOOKED_AT = (
    "model", "init", "data", "data_dir", "classes", "input", "method", "constraints", "budgets", "accounting",
    "schedule", "width", "rounds", "lr", "epochs", "augmentation", "seed",
    *RunConfig.keys_of("execution", "reading"),
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="a step of a plan as a program that phones and small boards train",
        description="Write a step of a plan as a program for the native device, which needs neither Python nor torch: "
        "the program with its memory plan, weights, a manifest, some of the data, and the program pocket that trains "
        "it. See docs/pocket.md. Needs ExecuTorch (the extra export).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig, only=LOOKED_AT)
    group = parser.add_argument_group("export")
    group.add_argument("--run", metavar="DIR", help="take settings and weights from a finished run")
    group.add_argument(
        "--step", metavar="N", help="which step of the plan, or all (default 0; of a run the last): one folder for each"
    )
    group.add_argument("--level", metavar="N", help="of several budgets, whose devices (from 0; default the weakest)")
    group.add_argument("--samples", metavar="N", help="training samples to put beside it (default at most 2000)")
    group.add_argument(
        "--verify", action="store_true", help="train it natively and by torch on this data, and compare them"
    )
    group.add_argument("--out", metavar="DIR", help="the folder to write")
    group.add_argument("--json", action="store_true", help="what was exported as JSON on stdout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from strata.cli import say_beginning

    if args.out is None:
        raise BadInput("give the folder to write: --out DIR")
    asked = given(argparse.Namespace(**{key: getattr(args, key) for key in LOOKED_AT}), RunConfig)
    if args.run is not None and asked:
        raise BadInput("a run has its settings: with --run give none of them, or leave it out")
    step = None if args.step in (None, "all") else at_least_one(int_text(args.step) + 1, "--step") - 1
    level = None if args.level is None else int_text(args.level, "--level")
    samples = None if args.samples is None else at_least_one(args.samples, "--samples")
    say_beginning("export", "loading torch, the model and the data")
    from strata.export.folder import export_folder  # torch: only once everything above has been read
    from strata.export.lowering import require_executorch

    require_executorch()
    if args.verify:
        from strata.export.native import library

        library()  # said before minutes of work, not after
    if args.run is not None:
        config = RunConfig.of_folder(Path(args.run), {})
    else:
        config = RunConfig.of(**asked)
        refuse_unused(asked, [config.approach.method])
        config.check()
    steps = "all" if args.step == "all" else step
    out = Path(args.out)
    found = []
    for one in export_folder(config, out, steps, level, samples, None if args.run is None else Path(args.run)):
        if args.verify:
            from strata.export.verify import verify

            one = one.verified(verify(one))
        found.append(one)
        if not args.json:
            say(one)
    if args.json:
        print(json.dumps({"out": str(out), "steps": [one.to_json() for one in found]}, indent=2))
    elif (out / "pocket").exists():
        print(f"Train it: {out / 'pocket'}")
    else:
        print("The native program is not built here: make native, then export again, and it is put beside the steps.")
    return 0 if all(one.holds for one in found) else 1


def int_text(text: str, flag: str = "--step") -> int:
    if not text.isdecimal():
        raise BadInput(f"{flag} is a whole number from 0{' or all' if flag == '--step' else ''}, not {text!r}")
    return int(text)


def say(one: Exported) -> None:
    size = one.manifest["bytes"]
    print(
        f"{one.folder}: {len(one.manifest['trained'])} trained and {len(one.manifest['frozen'])} frozen tensors, "
        f"{one.execution}"
    )
    print(
        f"  memory: {show_bytes(size['total'])} for a step ({show_bytes(size['arena'])} of it the arena), "
        f"{size['total'] / size['peak'] - 1:+.1%} of the plan's {show_bytes(size['peak'])}"
    )
    print(f"  program: {show_bytes((one.folder / 'step.pte').stat().st_size)}", flush=True)
    if one.verification is not None:
        print(f"  {one.verification}", flush=True)
        if not one.verification.holds:
            print("strata export: the native step does not follow torch's", file=sys.stderr)
