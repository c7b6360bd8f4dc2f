"""The server's Flower app: one run of Strata's round loop over the devices that are connected."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from strata.engines.flower.conducting import conduct
from strata.engines.flower.settings import RunSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    conduct(grid, RunSettings.from_config(context.run_config))
