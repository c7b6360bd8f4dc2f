"""What the fleet's commands print."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.sizes import show_bytes
from strata.fleet.protocol.settings import RunSettings

if TYPE_CHECKING:
    from strata.fleet.security.audit import Line
    from strata.fleet.security.keys import KeyFolder, NewKeys
    from strata.fleet.security.tokens import TokenRecord
    from strata.fleet.server.status import FleetState
    from strata.fleet.server.submission import Ending


def what_goes_where(made: NewKeys) -> str:
    from strata.fleet.security.certificates import expiry_of, hosts_of

    folder = made.folder
    lines = []
    if made.new_certificate:
        certificate = folder.certificate.read_bytes()
        lines += [
            f"server certificate: for {', '.join(hosts_of(certificate))}, until {expiry_of(certificate):%Y-%m-%d}"
        ]
    if made.new_fleet:
        lines += [
            f"server:    keep {folder.path} here (private) and run: strata fleet server --keys {folder.path}",
            f"operator:  whoever starts runs elsewhere needs {folder.authority} and {folder.token} in one folder",
            f"authority: {folder.authority_key} is needed for --renew only; best kept somewhere else",
        ]
    elif made.new_certificate:
        lines += ["the server takes it when it is started again"]
    if made.devices:
        lines += ["devices:   copy each one's folder to it, over a safe channel, and run it there:"]
        for name in made.devices:
            keys = folder.device(name).path
            lines += [
                f"  {name}: {keys} -> strata fleet device --keys {name} --server HOST:PORT --budget SIZE --data ..."
            ]
        if not made.new_fleet:
            lines += ["a server that is running admits them within seconds"]
    return "\n".join(lines)


def what_is_new(what: str, folder: KeyFolder, name: str | None) -> str:
    """After `strata fleet rotate`."""
    if what == "token":
        return f"another operator.token: copy {folder.token} to whoever starts runs; the old one is refused from now on"
    if what == "ca":
        return (
            f"another certificate authority: copy {folder.authority} to every device and operator, in place of theirs, "
            "then restart the server; until they have it they do not connect"
        )
    assert name is not None
    return f"another key for {name}: copy {folder.device(name).path} there, by a safe channel; the old one is shut out"


def close(ending: Ending, settings: RunSettings, as_json: bool, local: bool) -> int:
    """The last words of `strata fleet run`; its exit code."""
    out = Path(settings.out)
    summary = None
    if local and ending.status == "completed" and (out / "summary.json").is_file():
        summary = json.loads((out / "summary.json").read_text())
    if as_json:
        state = {"run": str(ending.run_id), "state": ending.status, "details": ending.details, "out": settings.out}
        print(json.dumps({**state, **(summary or {})}, indent=2))
    elif summary is not None:
        from strata.runs.progress import summarise
        from strata.runs.session import Result

        summarise(Result(out, summary))
    elif ending.status == "completed":
        print(f"run {ending.run_id} is finished: {settings.out} on the server")
    if ending.status == "stopped":
        print(
            f"strata fleet: run {ending.run_id} was stopped; go on with --out {settings.out} --resume", file=sys.stderr
        )
    elif ending.status != "completed":
        print(f"strata fleet: run {ending.run_id} {ending.status}: {ending.details}", file=sys.stderr)
    return ending.code


def show_tokens(named: Sequence[TokenRecord], as_json: bool) -> None:
    """With operator.token, which every key folder has."""
    rows = [("operator", "run", ""), *((one.operator.name, one.operator.role, one.made) for one in named)]
    if as_json:
        print(json.dumps([{"name": name, "role": role, "made": made or None} for name, role, made in rows], indent=2))
        return
    for name, role, made in rows:
        print(f"{name}  {role}  {f'made {made}' if made else 'operator.token'}")


def show_audit(lines: Iterable[Line], as_json: bool) -> None:
    """One line each: when, what, and the rest by name. Other people's words are shown as JSON writes them."""
    for line in lines:
        facts = line.facts
        if as_json or facts is None:
            print(line.text.decode("ascii", "backslashreplace"))
            continue
        rest = [
            f"{key}={_word(value)}" for key, value in facts.items() if key not in ("line", "time", "what", "before")
        ]
        time = str(facts.get("time", ""))[:19].replace("T", " ")
        print(f"{_word(facts.get('line'))}  {_word(time)}  {_word(facts.get('what'))}  {' '.join(rest)}".rstrip())


def _word(value: Any) -> str:
    text = json.dumps(value)
    return text[1:-1] if isinstance(value, str) and "\\" not in text else text


def show_status(state: FleetState) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    devices = Table(title=f"devices of {state.server}", title_justify="left")
    for column in ("name", "state", "last seen", "samples", "level", "in the run"):
        devices.add_column(column)
    for device in state.devices:
        level = (
            "-" if device.level_bytes is None else show_bytes(device.level_bytes) if device.level_bytes else "too small"
        )
        seen = (device.last_seen or "never").removesuffix("+00:00").replace("T", " ")
        samples = "-" if device.samples is None else str(device.samples)
        in_run = "-" if device.in_run is None else "yes" if device.in_run else "has left"
        devices.add_row(device.name or f"node {device.node}", device.state, seen, samples, level, in_run)
    console.print(devices if state.devices else "no devices: add some with `strata fleet keys`")
    runs = Table(title="runs", title_justify="left")
    for column in ("run", "state", "method", "rounds", "time"):
        runs.add_column(column, no_wrap=True)
    runs.add_column("folder", overflow="fold")
    for run in state.runs:
        rounds, seconds = (
            "-" if run.rounds is None else str(run.rounds),
            "-" if run.seconds is None else f"{run.seconds:.0f} s",
        )
        runs.add_row(run.run, run.state, run.method or "-", rounds, seconds, escape(run.out or "-"))
    console.print(runs if state.runs else "no runs yet")
