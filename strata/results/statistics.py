"""Mean and standard deviation over seeds: one definition for every table and figure.

The deviation is the sample's (n - 1), because seeds are a sample of all that could have been drawn. What the paper
printed is shown beside ours as printed, and never enters here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None from fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def show(mean: float, deviation: float | None, decimals: int = 1) -> str:
    """74.0 ± 2.0, or only the mean."""
    text = f"{mean:.{decimals}f}"
    return text if deviation is None else f"{text} ± {deviation:.{decimals}f}"


def show_percent(mean: float, deviation: float | None, decimals: int = 2) -> str:
    """The same of shares from 0 to 1, in percent and without its sign."""
    return show(100 * mean, None if deviation is None else 100 * deviation, decimals)
