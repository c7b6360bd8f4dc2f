"""The server's process: `python -m strata.fleet.superlink ...` is flower-superlink with the guard before its door.

The operator's token comes by the environment variable STRATA_OPERATOR_TOKEN, which is taken out again at once:
the server app's process has no use for it.
"""

from __future__ import annotations

import os
from typing import Any

from strata.fleet.children import end_with_launcher
from strata.fleet.environment import be_quiet
from strata.fleet.guard import Guard

TOKEN = "STRATA_OPERATOR_TOKEN"


def main() -> None:
    end_with_launcher()
    be_quiet()
    token = os.environ.pop(TOKEN, None)
    import uvicorn
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    theirs = extensions.get_middleware

    def with_guard() -> tuple[Middleware, ...]:
        return (Middleware(Guard, token=token), *theirs())

    serve = uvicorn.run

    def without_access_log(**settings: Any) -> None:  # devices ask for work every three seconds
        serve(**{**settings, "access_log": False, "forwarded_allow_ips": "127.0.0.1"})

    extensions.get_middleware = with_guard  # Flower's own hook for what comes first at the door
    uvicorn.run = without_access_log  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
