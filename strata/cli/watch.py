"""`strata watch`: the report's page of a run while it trains, on this machine only."""

from __future__ import annotations

import argparse
import re
import threading
from typing import TYPE_CHECKING

from strata.core.errors import BadInput

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLE = "example: strata watch runs/a"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "watch",
        help="watch a run in the browser while it trains",
        description="Serve the report's page of a run, or of a folder of runs, on 127.0.0.1. It follows the run while "
        "it trains and stays when it has ended. Ctrl-C ends it; the run is never touched.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or one that holds some")
    parser.add_argument("--port", default="0", metavar="N", help="the port (default: a free one)")
    parser.add_argument("--open", action="store_true", help="open the browser")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if not re.fullmatch("[0-9]{1,5}", args.port):  # isdigit() would take ² for one
        raise BadInput(f"a port is a number from 1 to 65535, not {args.port}")
    from strata.report.server import serving
    from strata.results.reading import clean

    try:
        with serving(args.run, int(args.port)) as server:
            print(f"watching {clean(args.run)} on {server.address} (Ctrl-C ends it)", flush=True)
            if args.open:
                import webbrowser

                webbrowser.open(server.address)
            threading.Event().wait()
    except KeyboardInterrupt:
        print()
    return 0
