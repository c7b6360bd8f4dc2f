"""What every process we start is told: no calls home, no installing, a Flower home of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from strata.core.errors import BadInput

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TRACING_ENABLED": "0",
}
LOCAL = ("localhost", "127.0.0.1", "::1")


def require_flower() -> None:
    for package in ("flwr", "cryptography"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"strata fleet needs {package}: pip install 'strata-fl[flower]'")


def be_quiet() -> None:
    """For Flower inside this process; before its first import."""
    os.environ.update(QUIET)


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes."""
    require_flower()
    env = dict(os.environ)
    env.update(QUIET)
    env["FLWR_HOME"] = str(home)
    scripts = sysconfig.get_path("scripts")
    for program in ("flwr-serverapp", "flwr-clientapp"):  # of this Python, never another's on PATH
        if shutil.which(program, path=scripts) is None:
            raise BadInput(f"there is no {program} in {scripts}: pip install 'strata-fl[flower]' with this Python")
    # Not the current folder: a file of any name there would run. A model of the user's is found there all the same.
    paths = [*env.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    env["PYTHONSAFEPATH"] = "1"  # for processes that Flower's own start, too
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's own ports
        env[name] = ",".join(dict.fromkeys([*filter(None, env.get(name, "").split(",")), *LOCAL]))
    return env
