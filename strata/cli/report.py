"""`strata report`: runs as one page that works offline, with tables and figures beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from strata.core.sizes import show_bytes

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLE = "example: strata report runs/cmp --out report"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="make a page, tables and figures of runs",
        description="One HTML page that works offline (index.html), tables (CSV, Markdown, LaTeX) and figures (PNG, "
        "SVG) of finished or unfinished runs. Runs that differ only in their seed are shown as mean ± standard "
        "deviation. The same command again brings the report up to date.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders that hold some")
    parser.add_argument(
        "--out", default="report", metavar="DIR", help="a new folder, or an earlier report (default report)"
    )
    parser.add_argument("--title", metavar="TEXT", help="the page's title")
    parser.add_argument("--no-figures", action="store_true", help="leave out the PNG and SVG figures")
    parser.add_argument("--json", action="store_true", help="print what the summary table says, for programs")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from strata.report import tables, write_report
    from strata.results.reading import clean

    made = write_report(args.runs, args.out, title=args.title, with_figures=not args.no_figures)
    table = tables.summary(made)
    page = Path(args.out) / "index.html"
    if args.json:
        rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        print(json.dumps({"page": str(page), "summary": rows}, indent=2, allow_nan=False))
        return 0
    for problem in made["problems"]:
        print(problem)
    for group in made["groups"]:
        if group["over_bytes"]:
            print(f"WARNING: {group['label']} took {show_bytes(round(group['over_bytes']))} more than its budget")
    for sentence in made["verdict"]:
        print(sentence)
    runs = sum(len(group["runs"]) for group in made["groups"])
    said = f"{page}: {runs} run{'s' if runs > 1 else ''}, tables in {page.parent / 'tables'}"
    if not args.no_figures:
        said += f", figures in {page.parent / 'figures'}"
    print(clean(said))  # a folder's name need not be UTF-8
    return 0
