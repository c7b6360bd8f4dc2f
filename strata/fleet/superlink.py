"""The server's process: `python -m strata.fleet.superlink ...` is flower-superlink with the guard before its door.

It starts Strata's own app and no other: the operator's token is no right to run code here.

The operator's token comes by the environment variable STRATA_OPERATOR_TOKEN, which is taken out again at once:
the server app's process has no use for it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from strata.fleet.addresses import Address
from strata.fleet.children import end_with_launcher
from strata.fleet.environment import be_quiet
from strata.fleet.executing import Executor
from strata.fleet.guard import Guard

TOKEN = "STRATA_OPERATOR_TOKEN"


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
    from starlette.middleware import Middleware

    from strata.fleet.app import bundle

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
    extensions.get_middleware = with_guard  # Flower's own hook for what comes first at the door
    uvicorn.run = without_access_log  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
