"""strata data: which data sets there are, `get` one, `show` who holds what."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.flags import add_flags, given
from strata.core.paths import expanded
from strata.runs.config import RunConfig

if TYPE_CHECKING:
    from strata.data.download import Progress

_PLACE = "folder the data sets are in (default $STRATA_DATA or ~/.cache/strata/data)"
_JSON = "print one JSON document"
_SHOWN = 1000  # devices at most in the table: a lazy fleet may have millions


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "data", help="which data sets there are, where from, what is on disk; get one; show who holds what",
        description="List the data sets: name, source, size to download, whether they are on disk.",
        epilog="example: strata data\n         strata data get cifar10 --dir ~/data\n"
        "         strata data show --data digits --partition dirichlet:0.1 --devices 20",
        formatter_class=text,
    )  # fmt: skip
    parser.add_argument("--dir", metavar="DIR", help=_PLACE)
    parser.add_argument("--json", action="store_true", help=_JSON)
    parser.set_defaults(func=list_data)
    actions = parser.add_subparsers(dest="action", metavar="get | show")

    get = actions.add_parser(
        "get", help="download a data set, with checksum, continuing what was begun",
        description="Download a data set and unpack it. A broken download continues where it stopped.",
        epilog="example: strata data get cifar10 --dir ~/data", formatter_class=text,
    )  # fmt: skip
    get.add_argument("name", metavar="NAME", help="a name from `strata data`")
    # SUPPRESS: what stands before `get` (strata data --dir DIR get NAME) must not be undone by a default here
    get.add_argument("--dir", metavar="DIR", default=argparse.SUPPRESS, help=_PLACE)
    get.add_argument("--mirror", metavar="URL", help="fetch the same files from this address (checksums still apply)")
    get.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=_JSON)
    get.set_defaults(func=get_data)

    show = actions.add_parser(
        "show", help="a table, and a picture, of which device holds how many samples of which class",
        description="Show how a partition spreads the training samples over the devices.",
        epilog="example: strata data show --data digits --partition dirichlet:0.1 --devices 20 --picture holdings.png",
        formatter_class=text,
    )  # fmt: skip
    show.add_argument("--data", default="digits", metavar="NAME", help="data set (default digits)")
    show.add_argument("--data-dir", "--dir", dest="dir", metavar="DIR", default=argparse.SUPPRESS, help=_PLACE)
    kinds = "iid, dirichlet:ALPHA, shards:N, user, lazy[:SAMPLES], file:PATH.json (default iid)"
    show.add_argument("--partition", default="iid", metavar="P", help=kinds)
    show.add_argument("--sizes", metavar="HOW", help="of iid and dirichlet: lognormal:SIGMA (default: all the same)")
    show.add_argument("--devices", type=int, default=100, metavar="N", help="number of devices (default 100)")
    show.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the partition (default 0)")
    show.add_argument("--picture", metavar="FILE", help="also draw it (png, pdf, svg)")
    add_flags(show, RunConfig, only=RunConfig.keys_of("reading"))
    show.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=_JSON)
    show.set_defaults(func=show_data)


def _place(folder: str | None) -> Path:
    from strata.data import default_root

    return expanded(folder) if folder else default_root()


def list_data(args: argparse.Namespace) -> None:
    from strata.data import CATALOGUE

    root = _place(args.dir)
    rows: list[dict[str, Any]] = []
    for entry in CATALOGUE.values():
        embedded = entry.download_bytes == 0
        found = entry.found(root)
        rows.append({
            "name": entry.name, "summary": entry.summary, "source": entry.source,
            "download_bytes": entry.download_bytes, "on_disk": found is not None,
            "path": None if embedded or found is None else str(found),
            "get": "embedded" if embedded else "download" if entry.downloads else "by hand",
        })  # fmt: skip
    if args.json:
        print(json.dumps({"dir": str(root), "data": rows}))
        return
    lines = [("name", "on disk", "download", "what", "source")]
    for row in rows:
        here = "in the package" if row["get"] == "embedded" else "yes" if row["on_disk"] else "no"
        lines.append((row["name"], here, _size(row), row["summary"], row["source"]))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"\nLooked in {root} (--dir or $STRATA_DATA for another folder). Fetch one: strata data get NAME --dir DIR")
    print("Your own pictures, a folder per class: --data folder --data-dir DIR (folder:64 to bring them to 64x64).")
    print("Your own text and tables: --data text:FILE.jsonl, --data table:FILE.csv (docs/own-data.md).")


def _size(row: dict[str, Any]) -> str:
    size = "-"
    for unit, scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if row["download_bytes"] >= scale:
            size = f"{row['download_bytes'] / scale:.0f} {unit}"
    return f"about {size}, by hand" if row["get"] == "by hand" else size


def get_data(args: argparse.Namespace) -> None:
    from strata.data import get

    root = _place(args.dir)
    path = get(args.name, root, args.mirror, _bar)
    if args.json:
        print(json.dumps({"name": args.name, "path": None if args.name == "digits" else str(path)}))
    elif args.name == "digits":
        print("digits is in the package; there is nothing to fetch")
    else:
        print(f"{args.name} is in {path}; use it with --data {args.name} --data-dir {root}")


def _bar(file: str) -> Progress:
    """A line on stderr that counts up; nothing where stderr is not a terminal."""
    shown = -1

    def progress(done: int, total: int | None) -> None:
        nonlocal shown
        percent = -1 if not total else 100 * done // total
        step = done >> 20 if percent < 0 else percent
        if sys.stderr.isatty() and step != shown:
            shown = step
            share = "" if percent < 0 else f" ({percent} %)"
            end = "\n" if done == total else ""
            print(f"\r{file}: {done / 1e6:.1f} MB{share} ", end=end, file=sys.stderr, flush=True)

    return progress


def show_data(args: argparse.Namespace) -> None:
    import numpy as np

    from strata.data import Reading, holdings, load, parse_partition, picture, table

    data = load(args.data, args.dir, Reading(**given(args, RunConfig, only=RunConfig.keys_of("reading"))))
    partition = parse_partition(args.partition, data, args.devices, args.seed, args.sizes)
    targets, names = data.train.targets, data.class_names
    has_classes = targets.dim() == 1 and not targets.is_floating_point()
    if has_classes:
        counts = holdings(partition, targets, data.classes, limit=_SHOWN)
    else:
        counts = holdings(partition, np.zeros(len(targets), dtype=np.int64), 1, limit=_SHOWN)
        names = ("of any kind",)
    title = f"{args.data}, {args.partition}, {args.devices} devices, seed {args.seed}"
    if args.picture:
        picture(counts, args.picture, title, names)
    held = (counts > 0).sum(axis=1)
    samples = counts.sum(axis=1)
    if args.json:
        summary = {"data": args.data, "partition": args.partition, "devices": len(partition), "seed": args.seed,
                   "classes_per_device": round(float(held.mean()), 3) if has_classes else None,
                   "counts": counts.tolist()}  # fmt: skip
        print(json.dumps(summary))
        return
    print(title)
    print(table(counts, names))
    if len(counts) < len(partition):
        print(f"... and {len(partition) - len(counts)} more devices")
    kinds = f"{held.mean():.1f} classes and " if has_classes else ""
    print(
        f"\n{kinds}{samples.mean():.1f} samples per device on average "
        f"(samples: least {samples.min()}, most {samples.max()}); {len(data.train)} training samples in all"
    )
    for note in data.notes:
        print(note)
    if args.picture:
        print(f"picture: {args.picture}")
