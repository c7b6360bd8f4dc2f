"""The device's process: `python -m strata.fleet.device.supernode ...` is flower-supernode that runs nothing but Strata.

How it refuses all else is in flower_patches.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from strata.core.processes import end_with_launcher
from strata.fleet.app_processes import AppStarter, StartedApps
from strata.fleet.device.warm_apps import WarmApps
from strata.fleet.environment import be_quiet
from strata.fleet.flower_patches import patch_device

POLL = "STRATA_POLL_SECONDS"


def main() -> None:
    be_quiet()
    from flwr.supernode.cli.flower_supernode import flower_supernode

    parser = argparse.ArgumentParser()
    for name in ("--host", "--port", "--superexec-auth-secret-file"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args()
    secret = Path(given.superexec_auth_secret_file)
    apps = WarmApps(otherwise=StartedApps(WarmApps.program, secret.parent))  # forks, so before there are threads
    end_with_launcher()
    starter = AppStarter(f"{given.host}:{given.port}", secret, authority=None, apps=apps)
    starter.start()
    patch_device(float(os.environ[POLL]), starter.told)
    flower_supernode()


if __name__ == "__main__":
    main()
