"""A phase's own way to train: the run's settings with what the method has put in their place."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from strata.execution import Execution

if TYPE_CHECKING:
    from strata.methods.base import Phase
    from strata.training.settings import LocalTraining


def settings_of(phase: Phase, settings: LocalTraining, round: int) -> LocalTraining:
    """In this round. Whose statistics norms use is the run's to say: the server keeps them."""
    if phase.execution is not None:
        names = [field.name for field in fields(Execution) if field.name != "norm_statistics"]
        settings = replace(settings, **{name: getattr(phase.execution, name) for name in names})
    if phase.objective is not None:
        settings = replace(settings, objective=phase.objective, loss=None)
    return settings.in_round(round)


def is_plain(phase: Phase) -> bool:
    """Whether it trains as the run says, one cut throughout."""
    return phase.execution is None and phase.objective is None and not phase.levels
