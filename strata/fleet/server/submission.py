"""`strata fleet run`: hand a run to the server, follow it, and say how it ended."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.core.errors import BadInput
from strata.core.paths import expanded
from strata.core.processes import Stopped, stopped_by_signals
from strata.core.settings import as_json
from strata.fleet.app_bundle import bundle, bundle_hash
from strata.fleet.log_filter import PREFIX, LogFilter
from strata.fleet.protocol.settings import KEY, NOBODY_JOINS, RunSettings
from strata.fleet.security.addresses import Unreachable
from strata.fleet.server.control import Access, Refused, connect

PAUSE = 2.0  # seconds before looking for a server that has gone
GONE = 120.0  # seconds after which it is given up
FORGOTTEN = (
    "the server was started again and no longer knows it (with --data-dir it keeps its runs over restarts); the run's "
    "folder is as it was: go on with --resume"
)


@dataclass(frozen=True)
class Ending:
    run_id: int
    status: str  # completed, failed, stopped or lost
    details: str
    failure: int = 1  # the exit code where it failed

    @property
    def code(self) -> int:
        return {"completed": 0, "stopped": 130}.get(self.status, self.failure)


def run_settings(asked: Mapping[str, Any], args: argparse.Namespace, local: bool) -> RunSettings:
    """From the command line: `asked` of the run's config, the rest in `args`. `local`: the server is this machine, so
    its folders are ours."""
    from strata.fleet.server.resuming import config_of
    from strata.runs.config import RunConfig
    from strata.runs.folder import refuse_used
    from strata.runs.unused import refuse_unused

    out = expanded(args.out)
    if not local and not out.is_absolute():
        raise BadInput(f"--out is a folder on the server, so give its whole path there, not {args.out!r}")
    out = out.absolute()
    if args.levels is not None and (args.resume or "budgets" in asked or "constraints" in asked):
        raise BadInput(
            "--levels groups the devices' own budgets, when a run begins: leave it out with --budget, --constraint or "
            "--resume"
        )
    if args.secure_aggregation is None and not args.resume:
        _refuse_unused_terms(args)
    if args.resume:  # what was asked for at first is in the folder, which may be out of our sight
        request = config_of(out, asked).to_json() if local else as_json(asked)
    else:
        if local:
            refuse_used(out, "--resume")
        config = RunConfig.of(**asked)
        refuse_unused(asked, [config.approach.method], budgets_follow=True)
        if args.evaluation == "devices":
            _refuse_server_data(asked)
        config.check(levels_needed=False)
        if args.members == "open" and config.options.private is not None:
            raise BadInput(NOBODY_JOINS)
        request = config.to_json()
    settings = RunSettings(
        request=request,
        out=str(out),
        resume=args.resume,
        from_round=args.from_round,
        minimum=args.wait_for,
        wait=args.wait,
        deadline=args.answer_deadline,
        evaluation=args.evaluation,
        members=args.members,
        secure_aggregation=args.secure_aggregation,
        secure_fewest=args.secure_fewest,
        secure_clip=args.secure_clip,
        workers=args.server_workers,
        levels=RunSettings.levels if args.levels is None else args.levels,
    )
    if args.secure_aggregation and not args.resume:
        from strata.fleet.server.secure_checks import check_asked

        if args.secure_clip is not None and "dp_clip" in asked:
            raise BadInput("--dp-clip bounds every value too: leave out --secure-clip")
        check_asked(config, settings.terms({}))
    return settings


def _refuse_unused_terms(args: argparse.Namespace) -> None:
    for name in ("secure_fewest", "secure_clip"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} is for --secure-aggregation: give that too, or leave it out")


def _refuse_server_data(asked: Mapping[str, Any]) -> None:
    """What the devices say of their data counts, and the server has none."""
    unused = [f"--{name.replace('_', '-')}" for name in ("data", "data_dir", "classes", "input") if name in asked]
    if unused:
        raise BadInput(f"with --evaluation devices the devices say what their data is: leave out {', '.join(unused)}")


def submit(settings: RunSettings, access: Access, *, show: Callable[[str], None], say: Callable[[str], None]) -> Ending:
    """`show` takes the server app's output as it comes, `say` what happens to the run."""
    with stopped_by_signals():
        with connect(access) as client:
            run_id = _start(client, settings)
        say(f"run {run_id} is with the server at {access.address}; Ctrl-C stops it")
        try:
            return _follow(access, run_id, show, say)
        except Stopped:
            say(f"stopping run {run_id}")
            return _stop(access, run_id)


def watch(run: str, access: Access, *, show: Callable[[str], None], say: Callable[[str], None]) -> Ending:
    """The output of a run that somebody has started, until it ends. Ctrl-C ends the watching."""
    unknown = f"the server at {access.address} knows no run {run}: `strata fleet status` lists them"
    if not run.isascii() or not run.isdigit() or int(run) >= 1 << 64:
        raise BadInput(unknown)
    try:
        with connect(access) as client:
            outcome(client, int(run))
    except KeyError:
        raise BadInput(unknown) from None
    except Refused as error:
        raise BadInput(unknown if error.status == 404 else str(error)) from None
    return _follow(access, int(run), show, say)


def _start(client: Any, settings: RunSettings) -> int:
    from flwr.common.config import parse_config_args
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    config = parse_config_args([settings.to_argument()])
    assert set(config) == {KEY}
    answer = client.StartRun(
        StartRunRequest(
            fab=fab_to_proto(Fab(bundle_hash(), bundle(), {})), override_config=user_config_to_proto(config)
        )
    )
    if not answer.HasField("run_id"):
        raise BadInput("the server did not take the run: see its log")
    return int(answer.run_id)


def _follow(access: Access, run_id: int, show: Callable[[str], None], say: Callable[[str], None]) -> Ending:
    """The server app's output until the run has ended. A connection that breaks is made again."""
    from flwr.proto.control_pb2 import StreamLogsRequest

    latest = 0.0
    log = LogFilter(show)
    away_since: float | None = None
    while True:
        try:
            with connect(access) as client:
                if away_since is not None:
                    outcome(client, run_id)  # something listens there again: does it also answer, and know the run?
                    say("the server is back")
                    away_since = None
                with _closing(client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=latest))) as stream:
                    for part in stream:
                        log.feed(part.log_output)
                        latest = max(latest, part.latest_timestamp)
                ending = outcome(client, run_id)
                if ending is not None:
                    code = log.end()
                    return replace(ending, failure=code)
        except Refused as error:
            return Ending(run_id, "lost", str(error) if error.status == 401 else FORGOTTEN)
        except BadInput as error:
            now = time.monotonic()
            if away_since is None:
                away_since = now
                say(f"{error}; waiting for it" if isinstance(error, Unreachable) else str(error))
            elif now - away_since > GONE:
                return Ending(run_id, "lost", f"the server has not answered for {GONE:.0f} s; last: {error}")
        time.sleep(PAUSE)


def outcome(client: Any, run_id: int) -> Ending | None:
    """How the run ended; None while it goes on."""
    from flwr.proto.control_pb2 import ListRunsRequest

    run = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
    if run.status.status != "finished":
        return None
    return Ending(run_id, run.status.sub_status, run.status.details.removeprefix(PREFIX))


def _stop(access: Access, run_id: int) -> Ending:
    from flwr.proto.control_pb2 import StopRunRequest

    try:
        with connect(access) as client:
            if outcome(client, run_id) is None:
                client.StopRun(StopRunRequest(run_id=run_id))
            return outcome(client, run_id) or Ending(run_id, "stopped", "")
    except BadInput as error:
        return Ending(run_id, "lost", f"the run could not be stopped: {error}")


@contextlib.contextmanager
def _closing(stream: Any) -> Iterator[Any]:
    try:
        yield stream
    finally:
        stream.close()
