"""The order of the suite: two files that mostly wait for processes of their own begin first, what computes runs beside
them, and no more than that of what waits; files that look at all networks share a process, because exporting those
takes minutes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.report.browser import CHROMIUM

pytest_plugins = ["tests.forked"]

WAITING = ("fleet/test_training.py", "fleet/test_real_processes.py")
LONG = ("docs/", "engines/test_ray.py", "fleet/test_admission.py")
ON_ALL_NETWORKS = (
    "graph/test_equivalence.py", "execution/test_peak.py", "execution/test_traced.py", "execution/test_compute.py",
    "execution/test_paper.py", "planning/test_plan.py", "planning/test_picture.py", "models/test_networks.py",
    "training/test_recomputation.py", "planning/test_widths.py",
)  # fmt: skip
HERE = Path(__file__).parent
# what many tests load sooner or later: once, before the processes part
LOADED_FIRST = ("torch.export._trace", "torch._dynamo", "transformers", "flwr.client", "matplotlib.pyplot")

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
    os.environ["STRATA_CACHE"] = tempfile.mkdtemp(prefix="strata-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop("STRATA_CACHE"), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (*WAITING, *ON_ALL_NETWORKS, *LONG)

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(HERE).as_posix()
        return next((number for number, start in enumerate(first) if path.startswith(start)), len(first))

    items.sort(key=place)  # stable: all else stays in its order
    for item in items:
        if item.path.as_posix().endswith(ON_ALL_NETWORKS):
            item.forked_with = "all networks"  # type: ignore[attr-defined]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("processes") > 1 and not session.config.option.collectonly:
        for name in LOADED_FIRST:
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(name)
        gc.freeze()  # what is there by now stays: no process need look through it again


@pytest.fixture
def compiler() -> None:
    """For tests of the kernels in C: asked when such a test begins, because every worker would build them to know."""
    from strata.training import kernels

    if not kernels.available():
        pytest.skip("there is no C compiler")


@pytest.fixture(scope="session")
def chromium() -> None:
    """For tests in a real browser, which CI installs while other tests run (.ci/run)."""
    coming = os.environ.get("STRATA_CHROMIUM_COMES")
    deadline = time.monotonic() + 600
    while coming and Path(coming).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM} (Debian's package chromium)")
