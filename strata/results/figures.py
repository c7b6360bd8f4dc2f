"""Figures of results: PNG and SVG, for print and screen, in the style of strata.core.pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.core import pictures
from strata.core.files import write_atomic

KINDS = ("png", "svg")


@contextlib.contextmanager
def figure(
    out: Path, name: str, rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None, **options: Any
) -> Iterator[tuple[Any, list[Path]]]:
    """`with figure(...) as (axes, files)`: a grid [row][column] of axes; saved, and named in `files`, at the end."""
    from matplotlib.figure import Figure

    width = 3.4 * columns if columns > 1 else 4.2
    files: list[Path] = []
    with pictures.style():
        made = Figure(figsize=size or (width, 2.6 * rows), layout="constrained")
        yield made.subplots(rows, columns, squeeze=False, **options), files
        for kind in KINDS:
            path = out / f"{name}.{kind}"
            write_atomic(path, pictures.encoded(made, kind))
            files.append(path)


def band(axes: Any, x: Sequence[float], mean: Sequence[float], spread: Sequence[float], **style: Any) -> None:
    """A line with plus and minus one standard deviation around it."""
    (line,) = axes.plot(x, mean, **style)
    if any(spread):
        low = [value - s for value, s in zip(mean, spread, strict=True)]
        high = [value + s for value, s in zip(mean, spread, strict=True)]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def points(axes: Any, x: Sequence[float], mean: Sequence[float], spread: Sequence[float], **style: Any) -> None:
    """Marked points with a bar of one standard deviation, joined by a line."""
    axes.errorbar(x, mean, spread, marker="o", markersize=4, capsize=2, **style)
