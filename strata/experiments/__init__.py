"""The paper's tables and figures by name: each a function that returns its runs and how to show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strata.core.errors import BadInput
from strata.experiments.base import Asked, Cell, Experiment, PlannedRun, option, shown
from strata.experiments.cells import Results
from strata.experiments.communication import figure_communication
from strata.experiments.figures import (
    figure_ablation,
    figure_limited_randomness,
    figure_mapping,
    figure_motivation,
    figure_steps,
)
from strata.experiments.frontier import table_frontier
from strata.experiments.steps import table_steps
from strata.experiments.tables import (
    table_digits,
    table_heterogeneous,
    table_iid,
    table_imagenet,
    table_noniid,
    table_writers,
)
from strata.experiments.true_bytes import table_true_bytes
from strata.experiments.words import table_words

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
    "table-frontier": table_frontier,
    "table-words": table_words,
    "table-writers": table_writers,
    "table-digits": table_digits,
}

__all__ = ["EXPERIMENTS", "Asked", "Cell", "Experiment", "PlannedRun", "Results", "experiment"]


def experiment(name: str, asked: Asked | None = None) -> Experiment:
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    asked = asked or Asked()
    made = EXPERIMENTS[name](asked)
    for key, value in asked.settings:
        if not any(dict(run.cell.options).get(key) == value for run in made.runs):
            raise BadInput(
                f"{option(key)} {shown(value)} changes no run of {name}: it is what they have, or they look at none. "
                "Leave it out"
            )
    return replace(made, name=asked.named(name))
