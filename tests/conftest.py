"""The order of the suite: files that mostly wait for processes of their own begin first, and others run beside them;
files that look at all networks share a process, because exporting those takes minutes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

WAITING = (
    "fleet/test_real_processes.py", "fleet/test_training.py", "fleet/test_admission.py", "docs/", "engines/test_ray.py",
)  # fmt: skip
ON_ALL_NETWORKS = (
    "graph/test_equivalence.py", "execution/test_peak.py", "execution/test_traced.py", "execution/test_compute.py",
    "execution/test_paper.py", "planning/test_plan.py", "planning/test_picture.py", "models/test_networks.py",
    "training/test_recomputation.py", "planning/test_widths.py",
)  # fmt: skip
HERE = Path(__file__).parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A suite started in the background ignores Ctrl-C, and so would all it starts; Flower ends its processes by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# One thread, as in worker processes: sums in another order have other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Runs are in the test's own process, which starts in no time; tests of worker processes say how many they want.
os.environ.setdefault("STRATA_WORKERS", "0")
# Ray's workers would give way to all other tests, and starve beside them; and what nobody uses costs a minute.
RAY = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0", "RAY_enable_metrics_collection": "0"}
os.environ.update(RAY)


def pytest_configure(config: pytest.Config) -> None:
    """One cache for all processes of a session, and not the user's: what one of them exports, the others read."""
    if not hasattr(config, "workerinput"):
        os.environ["STRATA_CACHE"] = tempfile.mkdtemp(prefix="strata-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("STRATA_CACHE"), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (*WAITING, *ON_ALL_NETWORKS)

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(HERE).as_posix()
        return next((number for number, start in enumerate(first) if path.startswith(start)), len(first))

    items.sort(key=place)  # stable: all else stays in its order


@pytest.fixture
def compiler() -> None:
    """For tests of the kernels in C: asked when such a test begins, because every worker would build them to know."""
    from strata.training import kernels

    if not kernels.available():
        pytest.skip("there is no C compiler")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """--dist loadfile, except that the files of ON_ALL_NETWORKS count as one."""
    from xdist.scheduler import LoadFileScheduling

    class ByNetworks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "all networks" if path.endswith(ON_ALL_NETWORKS) else path

    return ByNetworks(config, log) if config.getvalue("dist") == "loadfile" else None
