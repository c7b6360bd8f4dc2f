"""The paper's numbers, from published.json beside this file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedAccuracy:
    """In percent, of 3 seeds, as printed: which standard deviation it is, the paper does not say."""

    mean: float
    std: float


@cache
def content() -> dict[str, Any]:
    text = files("strata.experiments").joinpath("published.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def citation() -> str:
    return str(content()["citation"])


def published(
    table: str, data: str, model: str, partition: str, constraints: Sequence[float]
) -> dict[str, PublishedAccuracy]:
    """By method, for one column of a table; empty where the paper has none."""
    for column in content()["columns"]:
        key = (column["table"], column["data"], column["model"], column["partition"], tuple(column["constraints"]))
        if key == (table, data, model, partition, tuple(constraints)):
            return {method: PublishedAccuracy(*value) for method, value in column["accuracy"].items()}
    return {}
