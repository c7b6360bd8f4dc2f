"""The paper's tables and figures by name: each a function that returns its runs and how to show them."""

from __future__ import annotations

from collections.abc import Callable

from strata.core.errors import BadInput
from strata.experiments.base import Asked, Cell, Experiment, PlannedRun
from strata.experiments.cells import Results
from strata.experiments.communication import figure_communication
from strata.experiments.figures import (
    figure_ablation,
    figure_limited_randomness,
    figure_mapping,
    figure_motivation,
    figure_steps,
)
from strata.experiments.steps import table_steps
from strata.experiments.tables import table_digits, table_heterogeneous, table_iid, table_imagenet, table_noniid
from strata.experiments.true_bytes import table_true_bytes

EXPERIMENTS: dict[str, Callable[[Asked], Experiment]] = {
    "table-iid": table_iid,
    "table-noniid": table_noniid,
    "table-heterogeneous": table_heterogeneous,
    "table-imagenet": table_imagenet,
    "table-steps": table_steps,
    "figure-motivation": figure_motivation,
    "figure-communication": figure_communication,
    "figure-steps": figure_steps,
    "figure-limited-randomness": figure_limited_randomness,
    "figure-ablation": figure_ablation,
    "figure-mapping": figure_mapping,
    "table-true-bytes": table_true_bytes,
    "table-digits": table_digits,
}

__all__ = ["EXPERIMENTS", "Asked", "Cell", "Experiment", "PlannedRun", "Results", "experiment"]


def experiment(name: str, asked: Asked | None = None) -> Experiment:
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name](asked or Asked())
