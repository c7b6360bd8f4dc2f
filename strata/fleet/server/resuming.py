"""What a run was asked for, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.runs.config import RunConfig


def fitted(config: RunConfig, devices: int) -> RunConfig:
    """As it is kept in the folder of a run on so many devices: levels in ascending order, no more devices than all."""
    return config.changed(
        devices=devices,
        per_round=min(config.fleet.per_round, devices),
        constraints=tuple(sorted(set(config.approach.constraints))),
        budgets=tuple(sorted(set(config.approach.budgets))),
    )


def config_of(folder: Path, given: Mapping[str, Any]) -> RunConfig:
    """What the folder's run was asked for. `given`, by flat key, may repeat it, but not change it."""
    kept = RunConfig.of_folder(folder, {})
    repeated = fitted(RunConfig.from_json(given), kept.fleet.devices)
    return RunConfig.of_folder(folder, {key: getattr(repeated, key) for key in given})
