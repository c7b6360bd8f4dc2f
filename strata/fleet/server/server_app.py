"""The server's Flower app: one run of Strata's round loop over the devices that are connected."""

from __future__ import annotations

import os

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from strata.core.processes import watch_parent
from strata.fleet.protocol.settings import RunSettings
from strata.fleet.server.run import run_on_fleet

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    # Flower too ends an app whose SuperLink was killed, but by a signal that its own retries may sleep through.
    watch_parent(os.getppid())
    run_on_fleet(grid, RunSettings.from_config(context.run_config))
