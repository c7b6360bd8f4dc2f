"""What a run was asked for, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from strata.runs.request import Request


def fitted(request: Request, devices: int) -> Request:
    """As it is kept in the folder of a run on so many devices: levels in ascending order, no more devices than all."""
    return replace(
        request,
        devices=devices,
        per_round=min(request.per_round, devices),
        constraints=tuple(sorted(set(request.constraints))),
        budgets=tuple(sorted(set(request.budgets))),
    )


def request_of(folder: Path, given: Mapping[str, Any]) -> Request:
    """What the folder's run was asked for. `given` (as JSON) may repeat it, but not change it."""
    kept = Request.of_folder(folder, {})
    repeated = fitted(Request.from_json(given), kept.devices)
    return Request.of_folder(folder, {name: getattr(repeated, name) for name in given})
