"""The server's process: `python -m strata.fleet.server.superlink ...`, flower-superlink with the guard before its door.

It starts Strata's own app and no other: the operator's token is no right to send code here. It is a right to name code:
a run's `--model package.module:callable` is imported and called, so what is importable here can be run by who has it.

The operator's token comes by the environment variable STRATA_OPERATOR_TOKEN, which is taken out again at once:
the server app's process has no use for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.core.children import end_with_launcher
from strata.fleet.environment import be_quiet
from strata.fleet.security.addresses import Address
from strata.fleet.security.connection_guard import Guard
from strata.fleet.server.app_processes import Executor

TOKEN = "STRATA_OPERATOR_TOKEN"
MOST_OBJECTS = 1024  # of a device's answer, each at most guard.LARGEST; Flower sends arrays in pieces of 5 MiB


def main() -> None:
    umask = os.umask(0o077)  # the database has tokens in it
    end_with_launcher()
    be_quiet()
    token = os.environ.pop(TOKEN, None)
    import uvicorn
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from flwr.superlink.servicer.control import control_handlers
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    from strata.fleet.server.app_bundle import bundle

    start_run = control_handlers.start_run

    def start_strata(request: Any, *arguments: Any, **named: Any) -> Any:
        if request.app_spec or request.fab.content != bundle():
            raise FlowerError(ApiErrorCode.INVALID_APP_SPEC, "This server runs Strata's own app and no other.")
        return start_run(request, *arguments, **named)

    theirs = extensions.get_middleware

    def with_guard() -> tuple[Middleware, ...]:
        return (Middleware(Guard, token=token), *theirs())

    serve = uvicorn.run

    def without_access_log(**settings: Any) -> None:  # devices ask for work every three seconds
        serve(**{**settings, "access_log": False, "forwarded_allow_ips": "127.0.0.1"})

    read = argparse.ArgumentParser()
    for name in ("--host", "--port", "--ssl-ca-certfile", "--superexec-auth-secret-file"):
        read.add_argument(name)
    given, _ = read.parse_known_args()
    local = Address(given.host, int(given.port)).local
    authority = None if given.ssl_ca_certfile is None else Path(given.ssl_ca_certfile)
    secret = Path(given.superexec_auth_secret_file)
    Executor(str(local), "flwr-serverapp", secret, authority, umask).start()  # run folders are as the user wants them
    control_handlers.start_run = start_strata
    fleet_handlers.push_messages = within_bounds(fleet_handlers.push_messages)
    extensions.get_middleware = with_guard  # Flower's own hook for what comes first at the door
    uvicorn.run = without_access_log  # type: ignore[assignment]
    flower_superlink()


def within_bounds(push: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of devices' answers. What an answer announces is going to be kept: it has to end somewhere."""
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    def push_messages(request: Any, state: Any) -> Any:
        announced = itertools.chain.from_iterable(map(iterate_object_tree, request.message_object_trees))
        if next(itertools.islice(announced, MOST_OBJECTS, None), None) is not None:
            raise FlowerError(ApiErrorCode.FORBIDDEN_ACTION, f"An answer has at most {MOST_OBJECTS} objects.")
        return push(request=request, state=state)

    return push_messages


if __name__ == "__main__":
    main()
