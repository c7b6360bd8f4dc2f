"""`strata compare`: several methods under the same budget, data and seeds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.run import add_output_arguments, asked_of
from strata.core.errors import BadInput
from strata.core.flags import add_flags, split_list
from strata.core.sizes import show_bytes
from strata.runs.config import RunConfig
from strata.runs.entries import Entry
from strata.runs.unused import refuse_unused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.results.comparison import Row

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLE = "example: strata compare --methods slt,small,fd --data digits --constraint 0.125 --rounds 60 --out runs/cmp"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="train several methods under the same budget and seeds",
        description="Train several methods under the same budget, data and seeds; the same command again finishes what "
        "is unfinished. Prints mean and standard deviation over seeds, draws accuracy over rounds (PNG and SVG).",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, RunConfig, without=("method", "seed"))
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--methods",
        required=True,
        metavar="A,B,...",
        help="see `strata methods`; with settings of a step after a colon: fedavg:recompute+micro-batch=8",
    )
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per method (default 1)")
    group.add_argument("--seed", metavar="N", help="the first seed (default 0)")
    group.add_argument("--out", required=True, metavar="DIR", help="one run folder per method and seed is made in it")
    add_output_arguments(group)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    methods = split_list(args.methods)
    asked = asked_of(args)
    if not methods:
        raise BadInput("give the methods to compare, such as slt,small,fd")
    if not args.quiet:
        from strata.cli import say_beginning

        say_beginning("compare", f"loading torch, the model and the data, for {args.out}")
    from strata.engines import EngineFailed  # torch: only once everything above has been read
    from strata.federation import RoundFailed
    from strata.results.comparison import write_comparison
    from strata.runs.compare import compare

    names = [Entry.of(text).method for text in methods]
    refuse_unused(asked, names)
    out = Path(args.out)
    config = RunConfig.of(**{**asked, "method": names[0]})
    try:
        folders = compare(config, methods, args.seeds, out, progress=not args.quiet)
    except (RoundFailed, EngineFailed) as error:
        print(f"strata compare: {error}", file=sys.stderr)
        return 1
    rows = write_comparison(folders, out)
    if args.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        show(rows, out)
    return 0


def show(rows: Sequence[Row], out: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from strata.results.comparison import verdict
    from strata.results.statistics import show_percent

    table = Table(title=f"accuracy, mean ± std over {len(rows[0].accuracies)} seed(s)")
    for name in ("method", "accuracy", "largest device", "upload", "download", "TFLOP", "seconds"):
        # what tells two executions of a method apart is the end of its name
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in rows:
        table.add_row(
            row.method,
            f"{show_percent(row.mean, row.std)} %",
            show_bytes(row.peak_bytes) + (f" ({show_bytes(row.over_bytes)} OVER)" if row.over_bytes else ""),
            show_bytes(round(row.upload_bytes)),
            show_bytes(round(row.download_bytes)),
            f"{row.train_flops / 1e12:.3g}",
            f"{row.seconds:.1f}",
        )
    console = Console()
    console.print(table)
    for sentence in verdict(rows):
        console.print(escape(sentence), soft_wrap=True, highlight=False)
    console.print(escape(f"picture: {out / 'accuracy.png'} and {out / 'accuracy.svg'}"), soft_wrap=True)
