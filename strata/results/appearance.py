"""How a method is shown: its label and its colour are the same in experiments, comparisons and reports.

A method that is not known here is shown by its name, in a colour that depends on its name alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LABELS = {  # in the order in which `strata methods` lists them
    "slt": "SLT",
    "fedavg": "FedAvg",
    "small": "small model",
    "fd": "FD",
    "fedrolex": "FedRolex",
    "heterofl": "HeteroFL",
    "fjord": "FjORD",
}
COLOURS = {
    "slt": "#e07a10",
    "small": "#2f7ab8",
    "fd": "#1d9a85",
    "fedrolex": "#8a63c7",
    "heterofl": "#cf4d76",
    "fjord": "#a8861f",
    "fedavg": "#64708a",
}
OTHER_COLOURS = ("#4aa3d8", "#93a52c", "#b5603c", "#5a4fcf", "#2e8b57", "#b03a9c", "#7a5230")
CYCLE = (*COLOURS.values(), *OTHER_COLOURS)  # for lines that are not one method each


def label_of(method: str) -> str:
    return LABELS.get(method, method)


def colour_of(method: str) -> str:
    return COLOURS.get(method) or OTHER_COLOURS[_number(method) % len(OTHER_COLOURS)]


def colours_of(methods: Sequence[str]) -> list[str]:
    """One each: a method's own wherever that can be told from those before it, else the next that is free."""
    chosen: list[str] = []
    for method in methods:
        first = colour_of(method)
        free = [colour for colour in (first, *OTHER_COLOURS, *CYCLE) if colour not in chosen]
        chosen.append(free[0] if free else first)
    return chosen


def place_of(method: str) -> int:
    """Where it comes among others: as `strata methods` lists them, unknown ones last."""
    return list(LABELS).index(method) if method in LABELS else len(LABELS)


def cycle(count: int) -> list[str]:
    return [CYCLE[number % len(CYCLE)] for number in range(count)]


def _number(name: str) -> int:
    """The same in every process, which hash() is not."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:4])
