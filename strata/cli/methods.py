"""`strata methods`: what --method accepts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "methods", help="the methods, what their devices train and the papers they come from",
        description="The methods that --method accepts.", epilog="example: strata methods --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from strata.methods import METHODS  # torch: only once it is needed

    if args.json:
        keys = ("name", "trains", "evaluates", "levels", "paper", "options")
        print(json.dumps([{key: getattr(entry, key) for key in keys} for entry in METHODS.values()], indent=2))
        return
    for entry in METHODS.values():
        print(f"{entry.name}\n  a device trains  {entry.trains}\n  evaluated        {entry.evaluates}")
        print(f"  several levels   {entry.levels}\n  paper            {entry.paper}")
        if entry.options:
            print(f"  options          {', '.join(entry.options)}")
