"""The server's or a device's process just as `strata fleet` starts it, but for an app bundle that names `fleet_device`:
a module that each device has for itself, so that some can be rogues.

Started as `python -m tests.fleet.other_bundle server|device ...`.
"""

from __future__ import annotations

import sys

from strata.fleet import app_bundle, flower_patches
from strata.fleet.device import supernode
from strata.fleet.server import superlink

CONFIG = b"""
[project]
name = "loopback"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "strata"
[tool.flwr.app.components]
serverapp = "strata.fleet.server.server_app:app"
clientapp = "fleet_device:app"
[tool.flwr.app.config]
strata = ""
"""


def bundle() -> bytes:
    return app_bundle.bundle(CONFIG)


if __name__ == "__main__":
    flower_patches.bundle = bundle  # type: ignore[assignment]
    main = {"server": superlink.main, "device": supernode.main}[sys.argv.pop(1)]
    main()
