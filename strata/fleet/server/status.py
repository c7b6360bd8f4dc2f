"""`strata fleet status`: the devices and the runs that the server knows."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strata.fleet.protocol.settings import asked_of
from strata.fleet.server.control import Access, connect

PATIENCE = 2  # heartbeats that may be missed before Flower takes a device for offline


@dataclass(frozen=True)
class DeviceStatus:
    name: str  # empty for a device of a plain-text server, which registers itself
    node: str
    state: str  # online, offline, or registered: has not been seen yet
    last_seen: str | None  # ISO 8601, UTC
    samples: int | None = None  # as of its latest run, where that run's folder is on this machine
    level_bytes: int | None = None  # memory of the level it trains at; 0: it is too small for any
    in_run: bool | None = None  # whether it takes part in that run; False: it has left


@dataclass(frozen=True)
class RunState:
    run: str
    state: str  # pending, starting, running, completed, failed, stopped
    out: str | None
    method: str | None
    rounds: int | None
    started: str | None
    seconds: float | None
    received_bytes: int
    sent_bytes: int
    details: str


@dataclass(frozen=True)
class FleetState:
    server: str
    devices: tuple[DeviceStatus, ...]
    runs: tuple[RunState, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(access: Access) -> FleetState:
    with connect(access) as client:
        from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest

        nodes = client.ListNodes(ListNodesRequest())
        runs = client.ListRuns(ListRunsRequest())
    devices = sorted(
        (_device(node) for node in nodes.nodes_info if node.status != "unregistered"),
        key=lambda device: (device.name, device.node),
    )
    now = datetime.datetime.fromisoformat(runs.now)
    ordered = sorted(runs.run_dict.values(), key=lambda run: run.pending_at)
    listed = tuple(_run(run, now) for run in ordered)
    known = _known([run.out for run in listed]) if access.address.loopback else {}
    return FleetState(
        str(access.address), tuple(replace(device, **known.get(device.name, {})) for device in devices), listed
    )


def _known(folders: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    """What the runs' own files say of each device, the latest run last."""
    known: dict[str, dict[str, Any]] = {}
    for folder in folders:
        try:
            said = json.loads((Path(folder or "/nowhere") / "fleet.json").read_text())
            levels = [*said["start"], *said.get("joined", ())]
            left = {device: what == "left" for _, _, device, what in said.get("changes", ())}
            for index, name in enumerate(said["names"]):
                moves = [level for _, device, level in said["moves"] if device == index]
                level = (moves or [levels[index]])[-1]
                known[name] = {
                    "samples": int(said["samples"][index]),
                    "level_bytes": int(said["levels"][level]) if level >= 0 else 0,
                    "in_run": not left.get(index, False),
                }
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            continue
    return known


def _device(node: Any) -> DeviceStatus:
    seen = None
    if node.HasField("online_until") and node.online_until > 0 and node.last_activated_at:
        heartbeat = node.online_until - PATIENCE * node.heartbeat_interval
        seen = datetime.datetime.fromtimestamp(heartbeat, datetime.UTC).isoformat(timespec="seconds")
    if node.status == "offline" and node.last_deactivated_at:
        seen = _seconds(node.last_deactivated_at)
    return DeviceStatus(node.name, str(node.node_id), node.status, seen)


def _run(run: Any, now: datetime.datetime) -> RunState:
    request, out = asked_of(run.override_config)
    began = datetime.datetime.fromisoformat(run.running_at) if run.running_at else None
    ended = datetime.datetime.fromisoformat(run.finished_at) if run.finished_at else now
    return RunState(
        run=str(run.run_id),
        state=run.status.sub_status or run.status.status,
        out=out,
        method=request.get("method"),
        rounds=request.get("rounds"),
        started=_seconds(run.running_at) if run.running_at else None,
        seconds=None if began is None else round((ended - began).total_seconds(), 1),
        received_bytes=run.bytes_recv,
        sent_bytes=run.bytes_sent,
        details=run.status.details,
    )


def _seconds(time: str) -> str:
    return datetime.datetime.fromisoformat(time).isoformat(timespec="seconds")
