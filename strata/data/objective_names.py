"""Objectives by name, or your own by package.module:Class."""

from __future__ import annotations

from strata.core.errors import BadInput, one_line
from strata.core.importing import find
from strata.data.multi_label import MultiLabel
from strata.data.objectives import Classification, Objective, Regression
from strata.data.positions import NextToken, PerPosition

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Classification, MultiLabel, Regression, NextToken, PerPosition)
}


def objective_named(name: str) -> Objective:
    """classification, multi-label, regression, next-token, per-position, or a class of yours made from Objective."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]()
    if ":" not in name:
        raise BadInput(f"there is no objective {name!r}: choose {', '.join(OBJECTIVES)} or package.module:Class")
    kind = find(name, "objective", "package.module:Class, such as mypkg.goals:Ordinal", purpose="to learn by")
    if not isinstance(kind, type) or not issubclass(kind, Objective):
        raise BadInput(f"{name!r} is not a class made from strata.data.Objective")
    try:
        return kind()
    except Exception as error:
        raise BadInput(f"calling {name!r} to make the objective raised {one_line(error, kind=True)}") from error
