"""`strata fleet keys|revoke|rotate|token|audit|server|device|run|status|logs`: real devices, by Flower (an extra)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cli.run import add_output_arguments
from strata.core.errors import BadInput
from strata.core.flags import add_flags, given, split_list
from strata.core.paths import expanded
from strata.core.sizes import parse_bytes
from strata.runs.config import RunConfig

if TYPE_CHECKING:
    from strata.fleet.security.keys import KeyFolder
    from strata.fleet.server.control import Access

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fleet", help="train on real devices, through Flower",
        description="A fleet of real devices: one server, any number of devices, each with its own memory limit.",
        epilog="example: strata fleet keys keys --host 192.168.1.10 --devices 3",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="fleet_command", metavar="COMMAND", required=True)
    _add_keys(commands)
    _add_revoke(commands)
    _add_rotate(commands)
    _add_token(commands)
    _add_audit(commands)
    _add_server(commands)
    _add_device(commands)
    _add_run(commands)
    _add_status(commands)
    _add_logs(commands)


def _sub(commands: Subparsers, name: str, help: str, example: str, **more: Any) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter, **more,
    )  # fmt: skip


def _add_keys(commands: Subparsers) -> None:
    parser = _sub(
        commands, "keys", "make the keys of a fleet, or of further devices",
        "  strata fleet keys keys --host 192.168.1.10 --host fleet.local --devices pi-1,pi-2,laptop\n"
        "  strata fleet keys keys --devices 2",
    )  # fmt: skip
    parser.add_argument("folder", metavar="DIR", type=Path, help="the key folder: new, or one that this command made")
    parser.add_argument(
        "--host", action="append", metavar="NAME/IP",
        help="under which devices reach the server; several, or a comma list (this machine's own names always count)",
    )  # fmt: skip
    parser.add_argument(
        "--devices", action="append", metavar="N|NAMES", help="how many devices to add, or their names (a,b,c)"
    )
    parser.add_argument("--renew", action="store_true", help="make another server certificate (--host: other names)")
    parser.set_defaults(func=keys)


def _add_key_folder(parser: argparse.ArgumentParser) -> None:
    """For commands that are given where the server's keys are."""
    parser.add_argument("--keys", metavar="DIR", type=Path, required=True, help="the key folder, on the server")


def _add_revoke(commands: Subparsers) -> None:
    parser = _sub(
        commands, "revoke", "shut a device's key out, for good",
        "  strata fleet revoke pi-3 --keys keys",
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="of the device")
    _add_key_folder(parser)
    parser.set_defaults(func=revoke)


def _add_rotate(commands: Subparsers) -> None:
    parser = _sub(
        commands, "rotate", "replace the operator's token, the certificate authority, or a device's key",
        "  strata fleet rotate token --keys keys\n  strata fleet rotate ca --keys keys\n"
        "  strata fleet rotate device pi-3 --keys keys",
    )  # fmt: skip
    parser.add_argument("what", choices=("token", "ca", "device"), help="what is replaced")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the device")
    _add_key_folder(parser)
    parser.set_defaults(func=rotate)


def _add_token(commands: Subparsers) -> None:
    parser = _sub(
        commands, "token", "give an operator a token of their own, list them, or revoke one",
        "  strata fleet token ada --role watch --keys keys\n  strata fleet token ada --revoke --keys keys\n"
        "  strata fleet token --list --keys keys",
    )  # fmt: skip
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the operator, as the audit log will have it")
    parser.add_argument("--role", choices=("run", "watch"), help="run: start, stop and watch runs; watch: only watch")
    parser.add_argument("--revoke", action="store_true", help="refuse NAME's token from now on")
    parser.add_argument("--list", action="store_true", help="who has one")
    _add_key_folder(parser)
    parser.add_argument("--json", action="store_true", help="with --list: as JSON on stdout")
    parser.set_defaults(func=token)


def _add_audit(commands: Subparsers) -> None:
    parser = _sub(
        commands, "audit", "show the server's audit log, or check that it is whole",
        "  strata fleet audit --keys keys\n  strata fleet audit --keys keys --verify",
    )  # fmt: skip
    _add_key_folder(parser)
    parser.add_argument("--verify", action="store_true", help="check every line by the hash in the one after it")
    parser.add_argument("--first", type=int, metavar="N", help="with --verify: older lines than N were moved elsewhere")
    parser.add_argument("--holds", metavar="HASH", help="with --verify: a hash that an earlier --verify showed")
    parser.add_argument("--json", action="store_true", help="the lines as they are, or what --verify found")
    parser.set_defaults(func=audit)


def _add_server(commands: Subparsers) -> None:
    parser = _sub(
        commands, "server", "run the fleet's server",
        "  strata fleet server --keys keys\n  strata fleet server --insecure --port 9000",
    )  # fmt: skip
    _add_security(parser, "the folder that `strata fleet keys` made")
    parser.add_argument("--host", metavar="IP", help="listen here (default: everywhere; 127.0.0.1 with --insecure)")
    parser.add_argument("--port", type=int, metavar="N", help="one port for everything (default 8477)")
    parser.add_argument(
        "--data-dir", metavar="DIR", type=Path,
        help="keep the log and the lists of runs and devices here, over restarts (default: in memory)",
    )  # fmt: skip
    parser.set_defaults(func=server)


def _add_device(commands: Subparsers) -> None:
    parser = _sub(
        commands, "device", "make this machine a device of the fleet",
        "  strata fleet device --server 192.168.1.10:8477 --keys pi-1 --budget 64MiB --data folder:32 --data-dir pics\n"
        "  strata fleet device --server localhost:8477 --keys keys --name pi-1 --budget 64MiB --data digits --part 0/3",
    )  # fmt: skip
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="where the server is")
    _add_security(parser, "this device's folder of keys (or the whole key folder, with --name)")
    parser.add_argument("--name", metavar="NAME", help="of this device (default: its key folder's)")
    parser.add_argument("--budget", metavar="SIZE", help="memory for training, e.g. 64MiB (default: what is free here)")
    parser.add_argument(
        "--data", metavar="NAME", default="digits", help="see `strata data`, or text:FILE (default digits)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where the data is on disk")
    add_flags(parser, RunConfig, only=tuple(RunConfig.keys_of("reading")))
    parser.add_argument("--part", metavar="I/N", help="only part I of N (from 0) of the data: to try things out")
    parser.add_argument(
        "--partition", metavar="P", help="how --part splits: iid (default), dirichlet:0.1, shards:2 ..."
    )
    parser.add_argument("--split-seed", type=int, metavar="N", help="of that split (default 0)")
    parser.add_argument(
        "--hold-out", type=float, default=0.0, metavar="SHARE", help="of its data, to evaluate on (default 0)"
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="give up a task after this many seconds")
    parser.add_argument(
        "--cache", metavar="DIR", help="for frozen layers and logs (default ~/.cache/strata/fleet/NAME)"
    )
    parser.add_argument(
        "--model", action="append", metavar="PACKAGE.MODULE:CALLABLE",
        help="a model of yours that this device agrees to build; several (Strata's own networks always count)",
    )  # fmt: skip
    parser.add_argument(
        "--poll", type=float, default=1.0, metavar="S", help="seconds between two questions for work (default 1)"
    )
    parser.add_argument(
        "--only-sums", type=int, metavar="T",
        help="train only with secure aggregation, in sums over at least T devices (default: as the server asks)",
    )  # fmt: skip
    parser.add_argument("--no-hard-limit", action="store_true", help="do not let the system enforce the budget")
    parser.add_argument(
        "--no-wait", action="store_true", help="fail when the server cannot be reached, instead of waiting"
    )
    parser.set_defaults(func=device)


def _add_run(commands: Subparsers) -> None:
    parser = _sub(
        commands,
        "run",
        "train on the fleet that is connected to a server",
        "  strata fleet run --keys keys --model resnet20 --method slt --rounds 100 --per-round 3 --out /srv/runs/a\n"
        "  strata fleet run --keys keys --out /srv/runs/a --resume",
    )
    add_flags(parser, RunConfig, without=("deadline", "workers"), fleet=True)
    group = parser.add_argument_group("this run")
    _add_server_access(group)
    group.add_argument(
        "--out", metavar="DIR", help="the run folder, on the server: new, or with --resume one to continue"
    )
    group.add_argument("--resume", action="store_true", help="continue the run in --out, with its own settings")
    group.add_argument("--from-round", type=int, metavar="N", help="with --resume: go on after N rounds (--keep-every)")
    group.add_argument("--wait-for", type=int, metavar="N", help="devices to wait for at first (default 1)")
    group.add_argument("--wait", type=float, metavar="S", help="at most so many seconds (default 600)")
    group.add_argument(
        "--deadline",
        dest="answer_deadline",
        type=float,
        metavar="S",
        help="for a device's answer, in seconds (default 3600)",
    )
    group.add_argument(
        "--evaluation",
        choices=("server", "devices"),
        help="on the server's test data (default) or on what devices hold out",
    )
    group.add_argument(
        "--members",
        choices=("open", "fixed"),
        help="open (default): devices may join the run, and who is away longer than --wait leaves it; fixed: those "
        "that are there when it begins (always so with --dp-noise)",
    )
    group.add_argument(
        "--secure-aggregation",
        action="store_const",
        const=True,
        help="devices mask their updates: the server sees sums over several devices only (docs/security.md)",
    )
    group.add_argument(
        "--secure-fewest", type=int, metavar="T", help="of secure aggregation: devices in a sum, at least (default 3)"
    )
    group.add_argument(
        "--secure-clip",
        type=float,
        metavar="X",
        help="of secure aggregation: no value changes by more in a round, on its device (default 1)",
    )
    group.add_argument(
        "--levels", type=int, metavar="N", help="at most so many memory levels of the devices' budgets (default 4)"
    )
    group.add_argument(
        "--workers",
        dest="server_workers",
        type=int,
        default=0,
        metavar="N",
        help="of the server, for evaluation (default 0)",
    )
    add_output_arguments(group)
    parser.set_defaults(func=run)


def _add_status(commands: Subparsers) -> None:
    parser = _sub(commands, "status", "show the fleet's devices and runs", "  strata fleet status --keys keys --json")
    _add_server_access(parser)
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    parser.set_defaults(func=status)


def _add_logs(commands: Subparsers) -> None:
    parser = _sub(
        commands, "logs", "show the output of a run until it ends", "  strata fleet logs 1234567890 --keys keys"
    )
    parser.add_argument("run", metavar="RUN", help="its number, as `strata fleet status` shows it")
    _add_server_access(parser)
    parser.set_defaults(func=logs)


def _add_server_access(parser: Any) -> None:
    parser.add_argument("--server", default="localhost:8477", metavar="HOST:PORT", help="default localhost:8477")
    _add_security(parser, "the key folder, or one with its ca.pem and operator.token")


def _add_security(parser: Any, keys: str) -> None:
    parser.add_argument("--keys", metavar="DIR", type=Path, help=keys)
    parser.add_argument("--insecure", action="store_true", help="plain text, without keys; on this machine only")


# --- what the commands do --------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keys(args: argparse.Namespace) -> None:
    from strata.fleet.output import what_goes_where
    from strata.fleet.security.keys import make_keys
    from strata.fleet.security.signatures import fingerprint_of_file

    made = make_keys(expanded(args.folder), split_list(args.host), split_list(args.devices), args.renew)
    done = [*["fleet made"] * made.new_fleet, *["certificate renewed"] * (made.new_certificate and not made.new_fleet)]
    for what in done:
        _record(made.folder, what)
    for name in made.devices:
        public = (made.folder.registered / f"{name}.pub").read_bytes()
        _record(made.folder, "device key made", device=name, key=fingerprint_of_file(public))
    print(what_goes_where(made))


def revoke(args: argparse.Namespace) -> None:
    from strata.fleet.security.keys import KeyFolder
    from strata.fleet.security.revocation import revoke
    from strata.fleet.security.signatures import fingerprint_of_file

    folder = KeyFolder(expanded(args.keys))
    key = fingerprint_of_file(revoke(folder, args.name))
    _record(folder, "device revoked", device=args.name, key=key)
    print(f"{args.name} is shut out for good: a server that is running does so within seconds")


def rotate(args: argparse.Namespace) -> None:
    from strata.fleet.output import what_is_new
    from strata.fleet.security import revocation
    from strata.fleet.security.keys import KeyFolder

    if (args.what == "device") != (args.name is not None):
        raise BadInput("give a device's name after `rotate device`, and none after `rotate token` or `rotate ca`")
    folder = KeyFolder(expanded(args.keys))
    if args.what == "token":
        revocation.rotate_token(folder)
    elif args.what == "ca":
        revocation.rotate_authority(folder)
    else:
        revocation.rotate_device(folder, args.name)
    _record(folder, f"{args.what} rotated", device=args.name)
    print(what_is_new(args.what, folder, args.name))


def token(args: argparse.Namespace) -> None:
    from strata.fleet.output import show_tokens
    from strata.fleet.security.keys import KeyFolder, need_file
    from strata.fleet.security.tokens import make_token, records, revoke_token

    folder = KeyFolder(expanded(args.keys))
    need_file(folder.token, "give the key folder on the server, which `strata fleet keys` made")
    asked = [args.list, args.revoke, args.role is not None]
    if sum(asked) != 1 or (args.name is None) != args.list or (args.json and not args.list):
        raise BadInput("give one of `token NAME --role run|watch`, `token NAME --revoke` and `token --list [--json]`")
    if args.list:
        show_tokens(records(folder), args.json)
    elif args.revoke:
        revoke_token(folder, args.name)
        _record(folder, "operator's token revoked", token=args.name)
        print(f"the token of {args.name} is refused from now on")
    else:
        place = make_token(folder, args.name, args.role)
        _record(folder, "operator's token made", token=args.name, role=args.role)
        print(f"a token for {args.name} (role {args.role}): move {place} there, by a safe channel")
        print("the server keeps a hash of it, and takes it from now on")


def _record(folder: KeyFolder, what: str, **facts: Any) -> None:
    """In the audit log: what was done here, on the server itself."""
    from strata.fleet.security.audit import AuditLog, audit_folder, this_user

    AuditLog(audit_folder(folder.path), say).record(what, user=this_user(), **facts)


def audit(args: argparse.Namespace) -> None:
    from strata.fleet.output import show_audit
    from strata.fleet.security.audit import audit_folder, read_log, verify

    folder = audit_folder(expanded(args.keys))
    if not args.verify:
        if args.first is not None or args.holds is not None:
            raise BadInput("--first and --holds are for checking the log: give --verify too")
        return show_audit(read_log(folder)[0], args.json)
    end = verify(folder, 1 if args.first is None else args.first, args.holds)
    if args.json:
        print(json.dumps({"lines": end.line, "hash": end.digest}))
    else:
        print(f"{folder} is whole: {end.line} lines; the last one's hash, to be kept elsewhere: {end.digest}")
    return None


def server(args: argparse.Namespace) -> int:
    from strata.fleet.security.addresses import DEFAULT_PORT, parse_address
    from strata.fleet.server.command import serve

    _refuse_both(args)
    host = args.host or ("127.0.0.1" if args.insecure else "0.0.0.0")
    address = parse_address(f"[{host}]:{DEFAULT_PORT if args.port is None else args.port}")
    return serve(address, args.keys, insecure=args.insecure, data_dir=args.data_dir, say=say)


def device(args: argparse.Namespace) -> int:
    from strata.fleet.device.command import work
    from strata.fleet.protocol.settings import DeviceSettings
    from strata.fleet.security.addresses import parse_address
    from strata.fleet.security.keys import device_keys

    _refuse_both(args)
    own = None
    if not args.insecure:
        if args.keys is None:
            raise BadInput(
                "give --keys with this device's keys (or --insecure for a plain-text server on this machine)"
            )
        own = device_keys(expanded(args.keys), args.name)
    name = args.name or (own.name if own else None)
    if name is None:
        raise BadInput("give --name with this device's name: there are no keys to take it from")
    if not 0.1 <= args.poll <= 60:
        raise BadInput(f"--poll is from 0.1 to 60 seconds, not {args.poll}")
    index, count = _part(args.part)
    if args.part is None and (args.partition or args.split_seed is not None):
        raise BadInput("--partition and --split-seed say how --part splits the data: give --part I/N too")
    settings = DeviceSettings(
        name=name, budget=None if args.budget is None else parse_bytes(args.budget),
        data=args.data if args.data_dir is not None else RunConfig.of(data=args.data).problem.data,
        data_dir=None if args.data_dir is None else str(expanded(args.data_dir).absolute()),
        partition=None if args.part is None else args.partition or "iid", index=index, devices=count,
        seed=args.split_seed or 0, hold_out=args.hold_out, deadline=args.deadline,
        cache=None if args.cache is None else str(expanded(args.cache).absolute()),
        models=tuple(args.model or ()), hard_limit=not args.no_hard_limit, only_sums=args.only_sums,
        reading=tuple(given(argparse.Namespace(**{key: getattr(args, key) for key in READ}), RunConfig).items()),
    )  # fmt: skip
    return work(settings, parse_address(args.server), own, say=say, wait=not args.no_wait, poll=args.poll)


READ = tuple(RunConfig.keys_of("reading"))


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    index, _, count = text.partition("/")
    if not (text.isascii() and index.isdigit() and count.isdigit()):
        raise BadInput(f"--part is written I/N, such as 0/3 for the first of three, not {text!r}")
    return int(index), int(count)


def run(args: argparse.Namespace) -> int:
    from strata.fleet.output import close
    from strata.fleet.server.submission import run_settings, submit

    if args.out is None:
        raise BadInput("give --out DIR, the run folder on the server")
    access = _access(args)
    settings = run_settings(given(args, RunConfig), args, access.address.loopback)
    ending = submit(settings, access, show=(lambda _: None) if args.quiet else _show, say=say)
    return close(ending, settings, args.json, access.address.loopback)


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def status(args: argparse.Namespace) -> None:
    from strata.fleet.output import show_status
    from strata.fleet.server.status import look

    state = look(_access(args))
    if args.json:
        print(json.dumps(state.to_json(), indent=2))
    else:
        show_status(state)


def logs(args: argparse.Namespace) -> int:
    from strata.fleet.server.submission import watch

    ending = watch(args.run, _access(args), show=_show, say=say)
    say(f"run {ending.run_id} {ending.status}{': ' if ending.details else ''}{ending.details}")
    return ending.code


def _access(args: argparse.Namespace) -> Access:
    from strata.fleet.security.addresses import parse_address
    from strata.fleet.server.control import Access

    _refuse_both(args)
    return Access.of(parse_address(args.server), args.keys, args.insecure)


def _refuse_both(args: argparse.Namespace) -> None:
    if args.insecure and args.keys is not None:
        raise BadInput("--insecure is plain text, for which keys are not used: leave out --insecure, or --keys")
