"""`strata-device`: the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from strata_device import __version__
from strata_device.errors import BadInput

EXAMPLES = """examples:
  strata-device --server 192.168.1.10:8477 --keys pi-1 --budget 16MiB --data pictures.npz
  strata-device --server localhost:8477 --keys keys --name pi-1 --budget 16MiB --data digits --part 0/3
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "strata-device",
        description="Make this machine a device of a Strata fleet, without torch: it trains step programs that the "
        "fleet's server exports.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--server", required=True, metavar="HOST:PORT", help="where the server is")
    add("--keys", metavar="DIR", help="this device's folder of keys (or the whole key folder, with --name)")
    add("--insecure", action="store_true", help="plain text, without keys; on this machine only")
    add("--name", metavar="NAME", help="of this device (default: its key folder's)")
    add("--budget", metavar="SIZE", help="memory for training, e.g. 16MiB (default: what is free here)")
    add("--data", metavar="DATA", default="digits", help="digits, an .npz file, or a folder with one (default digits)")
    add("--classes", type=int, metavar="N", help="of an .npz that does not say how many there are")
    add("--part", metavar="I/N", help="only part I of N (from 0) of the data: to try things out; needs numpy")
    add("--split-seed", type=int, metavar="N", help="of that split (default 0)")
    add("--hold-out", type=float, default=0.0, metavar="SHARE", help="of its data, to evaluate on (default 0)")
    add("--deadline", type=float, metavar="S", help="give up a task after this many seconds")
    add("--cache", metavar="DIR", help="for programs, frozen layers and the log (default ~/.cache/strata/device/NAME)")
    add("--library", metavar="FILE", help="the native library (default: beside this package, or native/build)")
    add("--poll", type=float, default=1.0, metavar="S", help="seconds between two questions for work (default 1)")
    add("--no-hard-limit", action="store_true", help="do not let the system enforce the budget")
    add("--no-wait", action="store_true", help="fail when the server cannot be reached, instead of waiting")
    add("--version", action="version", version=f"strata-device {__version__}")
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return run(args)
    except BadInput as error:
        print(f"strata-device: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    from strata_device.addresses import parse_address
    from strata_device.device import work
    from strata_device.keys import device_keys
    from strata_device.settings import Settings, parse_bytes

    server = parse_address(args.server)
    if args.insecure and args.keys is not None:
        raise BadInput("--insecure is plain text, for which keys are not used: leave out --insecure, or --keys")
    if not args.insecure and args.keys is None:
        raise BadInput("give --keys with this device's keys (or --insecure for a plain-text server on this machine)")
    keys = None if args.insecure else device_keys(Path(args.keys).expanduser(), args.name)
    name = args.name or (keys.name if keys else None)
    if name is None:
        raise BadInput("give --name with this device's name: there are no keys to take it from")
    if not 0.1 <= args.poll <= 60:
        raise BadInput(f"--poll is from 0.1 to 60 seconds, not {args.poll}")
    if args.part is None and args.split_seed is not None:
        raise BadInput("--split-seed says how --part splits the data: give --part I/N too")
    part, parts = _part(args.part)
    data = args.data if args.data == "digits" else str(Path(args.data).expanduser().absolute())
    settings = Settings(
        name=name,
        folder=str(Path(args.cache or f"~/.cache/strata/device/{name}").expanduser().absolute()),
        budget=None if args.budget is None else parse_bytes(args.budget),
        data=data,
        classes=args.classes,
        part=part,
        parts=parts,
        seed=args.split_seed or 0,
        hold_out=args.hold_out,
        deadline=args.deadline,
        hard_limit=not args.no_hard_limit,
        library=args.library,
    ).check()
    return work(settings, server, keys, say=say, wait=not args.no_wait, poll=args.poll)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    index, _, count = text.partition("/")
    if not (text.isascii() and index.isdigit() and count.isdigit()):
        raise BadInput(f"--part is written I/N, such as 0/3 for the first of three, not {text!r}")
    return int(index), int(count)
