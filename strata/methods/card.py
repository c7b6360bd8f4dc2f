"""A method's card: what lists, tables, pictures and command lines say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.core.settings import Setting


@dataclass(frozen=True)
class Card:
    """Only the name is needed."""

    name: str  # what --method accepts
    label: str = ""  # in tables and pictures; the name where there is none
    colour: str | None = None  # in every picture, such as "#e07a10"; None: the next free one
    paper: str = ""
    trains: str = ""  # what a device trains, in one line
    evaluates: str = ""
    levels: str = ""  # what devices of different sizes do
    options: Mapping[str, Setting] = field(default_factory=dict)  # what `create` takes beyond constraints or a plan
    needs_plan: bool = False
    for_pretrained: bool = False  # keeps weights as they came: of use where they have been trained before

    @property
    def title(self) -> str:
        return self.label or self.name
