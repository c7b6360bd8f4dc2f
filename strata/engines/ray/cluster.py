"""Joining a Ray cluster, or starting one that ends with us. A cluster that others started is never stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.core.processes import handlers_kept
from strata.engines.base import EngineFailed
from strata.engines.ray import Ray, host_and_port

LOOPBACK = "127.0.0.1"
NO_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" in a process's environment: this machine alone
ANSWER_SECONDS = 10.0
START_TRIES = 3  # Ray gives each of its own processes 30 seconds, which a busy machine can exceed
QUIET = {  # read when Ray is imported, and by all that it starts
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing calls out
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # Ray says on stdout, which is ours, what we deal with: lost workers and nodes
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|node with node id|Raylet is terminated",
}


def import_ray() -> Any:
    os.environ.update(QUIET)
    try:
        import ray
    except ImportError as error:
        raise BadInput("the engine ray needs Ray, which is not installed: pip install 'strata-fl[ray]'") from error
    return ray


class ClusterConnection:
    """This process's place in a cluster; the last `close` leaves it, and ends it if it was started here."""

    _users = 0  # a process is in one cluster at a time, with however many engines
    _ours = False  # else the caller's own ray.init came first, and stays

    def __init__(self, settings: Ray, cpus: int) -> None:
        """`cpus`: of the cluster that is started where no address is given."""
        self.ray = import_ray()
        if not self.ray.is_initialized():
            with handlers_kept(signal.SIGTERM), warnings.catch_warnings():  # ray.init takes it for itself; it is ours
                warnings.simplefilter("ignore")
                self._start(cpus) if settings.address is None else self._join(settings.address)
            ClusterConnection._users, ClusterConnection._ours = 0, True
        elif settings.address not in (None, "auto"):
            here = self.ray.get_runtime_context().gcs_address
            if _resolved(settings.address) != _resolved(here):
                raise BadInput(f"this process is connected to the Ray cluster at {here}, not {settings.address}")
        ClusterConnection._users += 1

    def capacity(self, gpus: float) -> int:
        """How many workers of one CPU (and a share of a GPU) the cluster's nodes can hold, whoever uses them now."""
        room = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = math.floor(has.get("CPU", 0.0))
                if gpus:
                    each = gpus if gpus >= 1 else 1 / math.floor(1 / gpus + 1e-9)  # a share lies within one GPU
                    fits = min(fits, math.floor(has.get("GPU", 0.0) / each + 1e-9))
                room += fits
        return room

    def nodes(self) -> set[str]:
        """Those that are alive."""
        return {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}

    def close(self) -> None:
        """Once."""
        ClusterConnection._users -= 1
        if self._ours and not self._users:
            self.ray.shutdown()  # leaves; ends the processes that our own init started, and no others
            ClusterConnection._ours = False

    def _start(self, cpus: int) -> None:
        for left in reversed(range(START_TRIES)):
            # "local": also where RAY_ADDRESS or a file of a cluster long gone (ray_current_cluster) names another
            try:
                with _on_loopback():
                    self.ray.init(
                        address="local",
                        num_cpus=cpus,
                        include_dashboard=False,
                        _node_ip_address=LOOPBACK,
                        **self._common,
                    )
                return
            except Exception as error:  # a machine so busy that Ray's own time limits pass, for one
                self.ray.shutdown()
                if not left:
                    raise EngineFailed(f"Ray did not start on this machine: {one_line(error, 300)}") from error

    def _join(self, address: str) -> None:
        if address != "auto":
            host, port = host_and_port(address)
            try:
                socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
            except OSError as error:
                raise BadInput(
                    f"nobody answers at {address} ({error.strerror or error}): give the address that `ray start "
                    "--head` printed, or leave --ray-address out to use this machine alone"
                ) from error
        try:
            self.ray.init(address=address, **self._common)
        except Exception as error:  # Ray's own kinds differ between versions
            self.ray.shutdown()
            raise BadInput(
                f"the Ray cluster at {address} cannot be joined from this machine ({one_line(error, 300)})"
            ) from error

    @property
    def _common(self) -> dict[str, Any]:
        return {"log_to_driver": False, "logging_level": logging.ERROR, "job_config": _without_current_folder()}


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """A cluster that is started here listens on this machine's own address only: whoever reaches one can run code.
    Ray turns 127.0.0.1 into the machine's outer address, except where it makes no clusters (macOS and Windows)."""
    from ray._private import ray_constants

    makes_clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[NO_CLUSTERS] = "0"  # for the processes that Ray starts
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = makes_clusters
        del os.environ[NO_CLUSTERS]


def _without_current_folder() -> Any:
    """Ray puts the current folder first where its workers look for modules, unless a job brings its own folder; any
    file there would take the place of an installed package. Workers are told where to look by us."""
    from ray.job_config import JobConfig

    class OwnPlaces(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnPlaces()


def _resolved(address: str) -> tuple[str, int]:
    host, port = host_and_port(address)
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return host, port
