"""A phase's own way to train: the run's settings with what the method has put in their place."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.data.objectives import Classification, MaskedClassification
from strata.execution import Execution
from strata.methods.base import Phase
from strata.training.settings import cross_entropy

if TYPE_CHECKING:
    from strata.training.settings import LocalTraining


def settings_of(phase: Phase, settings: LocalTraining, round: int) -> LocalTraining:
    """In this round. Whose statistics norms use is the run's to say: the server keeps them."""
    if phase.execution is not None:
        names = [field.name for field in fields(Execution) if field.name != "norm_statistics"]
        settings = replace(settings, **{name: getattr(phase.execution, name) for name in names})
    if phase.objective is not None:
        settings = replace(settings, objective=phase.objective, loss=None)
    if phase.masked:
        if settings.loss not in (None, cross_entropy) or type(settings.objective) is not Classification:
            raise BadInput(
                "the variant original masks classes in its own cross-entropy: leave out the variant, or the loss or "
                "objective of your own"
            )
        settings = replace(settings, objective=MaskedClassification(), loss=None)
    if phase.clip is not None:
        settings = replace(settings, clip=phase.clip)
    if phase.levels and settings.release_gradients:
        raise BadInput(
            "gradients cannot be released as they are made where mini-batches train levels of one network: "
            "leave out release_gradients"
        )
    return settings.in_round(round)


def is_plain(phase: Phase) -> bool:
    """Whether it trains one cut throughout, as the run says, but for its Execution."""
    return phase == Phase(phase.cut, execution=phase.execution)
