"""The server's Flower app: one run of Strata's round loop over the devices that are connected."""

from __future__ import annotations

import os
import resource
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from strata.core.processes import watch_parent
from strata.fleet.device.available_memory import memory_limit
from strata.fleet.flower_patches import patch_app
from strata.fleet.protocol.settings import RunSettings
from strata.fleet.server.members_record import members_record
from strata.fleet.server.run import run_on_fleet

SHARE = 0.75  # of the machine's memory, for the server app: what goes wrong there must not take the machine along

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    # Flower too ends an app whose SuperLink was killed, but by a signal that its own retries may sleep through.
    watch_parent(os.getppid())
    patch_app()
    limit_memory()
    run_on_fleet(grid, RunSettings.from_config(context.run_config), members_record(context.run_id))


def limit_memory() -> None:
    """Beyond it an allocation is an error, which costs one answer or ends one run."""
    if sys.platform != "linux":  # elsewhere it bounds something else
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(SHARE * memory_limit())
    for other in (soft, hard):
        most = most if other == resource.RLIM_INFINITY else min(most, other)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
