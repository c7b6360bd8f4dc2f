"""How a method is shown: as its card says, in experiments, comparisons and reports alike.

A method that is not registered is shown by its name, and without a colour of its own in one that depends on its name
alone. What a run folder names is never imported to find out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.methods.card import Card

OTHER_COLOURS = ("#4aa3d8", "#93a52c", "#b5603c", "#5a4fcf", "#2e8b57", "#b03a9c", "#7a5230")
# for lines that are not one method each
CYCLE = ("#e07a10", "#2f7ab8", "#1d9a85", "#8a63c7", "#cf4d76", "#a8861f", "#64708a", *OTHER_COLOURS)


SHADES = (0.0, -0.4, 0.35, -0.62, 0.55)  # of a method that is there several times


def _cards() -> Mapping[str, Card]:
    """In the order in which `strata methods` lists them."""
    from strata.methods import METHODS  # torch: only once something is shown

    return {name: method.card for name, method in METHODS.items()}


def label_of(method: str) -> str:
    card = _cards().get(method)
    return method if card is None else card.title


def colour_of(method: str) -> str:
    card = _cards().get(method)
    if card is not None and card.colour is not None:
        return card.colour
    return OTHER_COLOURS[_number(method) % len(OTHER_COLOURS)]


def colours_of(methods: Sequence[str]) -> list[str]:
    """One each: a method's own wherever that can be told from those before it, else the next that is free."""
    chosen: list[str] = []
    for method in methods:
        first = colour_of(method)
        free = [colour for colour in (first, *OTHER_COLOURS, *CYCLE) if colour not in chosen]
        chosen.append(free[0] if free else first)
    return chosen


def shades_of(methods: Sequence[str]) -> list[str]:
    """A colour for each, which says the method and nothing else: where one comes several times, in shades of it."""
    own = dict(zip(dict.fromkeys(methods), colours_of(list(dict.fromkeys(methods))), strict=True))
    seen: Counter[str] = Counter()
    found = []
    for method in methods:
        found.append(_shade(own[method], SHADES[seen[method] % len(SHADES)]))
        seen[method] += 1
    return found


def _shade(colour: str, by: float) -> str:
    """Towards black (below 0) or white (above)."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    mixed = (part + (255 - part) * by if by > 0 else part * (1 + by) for part in parts)
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def place_of(method: str) -> int:
    """Where it comes among others: as `strata methods` lists them, unknown ones last."""
    known = list(_cards())
    return known.index(method) if method in known else len(known)


def cycle(count: int) -> list[str]:
    return [CYCLE[number % len(CYCLE)] for number in range(count)]


def _number(name: str) -> int:
    """The same in every process, which hash() is not."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:4])
