"""The command line: `strata COMMAND ...`.

A command is a module here with `add_parser(subparsers)`; its parser calls `set_defaults(func=f)` with
`f(args) -> int | None` (the exit code, None = 0). It raises BadInput or Infeasible and never prints a traceback for
either; any other exception is a bug and shows one. Modules import torch only inside their functions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from strata import __version__
from strata.core.errors import BadInput, Infeasible

COMMANDS = ("fit", "plan", "run", "compare", "report", "watch", "data", "methods", "experiment", "fleet", "export")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strata",
        description="Train, over a fleet of devices, a network that none of them has the memory to train.",
        epilog="example: strata plan --model resnet20 --constraint 0.25 --rounds 2500",
    )
    parser.add_argument("--version", action="version", version=f"strata {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        importlib.import_module(f"strata.cli.{command}").add_parser(subparsers)
    return parser


def say_beginning(command: str, what: str) -> None:
    """To a person at a terminal, before torch is loaded: a moment of silence looks like a fault."""
    if sys.stderr.isatty():
        print(f"strata {command}: {what}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    empty = next((text for text in argv if text.startswith("-") and text.endswith("=--")), None)
    if empty is not None:  # argparse would make an empty list of it
        print(f"strata: {empty.removesuffix('=--')} needs a value, and -- is none", file=sys.stderr)
        return 2
    args = build_parser().parse_args(argv)
    try:
        code = args.func(args)
        sys.stdout.flush()
        return code or 0
    except BadInput as error:
        print(f"strata {args.command}: {error}", file=sys.stderr)
        return 2
    except Infeasible as error:
        print(f"strata {args.command}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"strata {args.command}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has gone: nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
