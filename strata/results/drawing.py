"""Figures in one style: PNG and SVG, for print and screen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.core.files import said_plainly

_STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 8, "lines.linewidth": 1.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5,
    "legend.frameon": False, "savefig.dpi": 200, "svg.fonttype": "none", "svg.hashsalt": "strata",
}  # fmt: skip


@contextlib.contextmanager
def figure(out: Path, name: str, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, list[Path]]]:
    """`with figure(...) as (axes, files)`: a grid [row][column] of axes; saved, and named in `files`, at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        size = (3.4 * columns if columns > 1 else 4.2, 2.6 * rows)
        made, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
        files: list[Path] = []
        try:
            yield axes, files
            with said_plainly(out):
                for suffix in ("png", "svg"):
                    path = out / f"{name}.{suffix}"
                    # no date inside: the same results give the same file
                    made.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
                    files.append(path)
        finally:
            pyplot.close(made)


def band(axes: Any, x: Sequence[float], mean: Sequence[float], spread: Sequence[float], **style: Any) -> None:
    """A line with plus and minus one standard deviation around it."""
    (line,) = axes.plot(x, mean, **style)
    if any(spread):
        low = [value - s for value, s in zip(mean, spread, strict=True)]
        high = [value + s for value, s in zip(mean, spread, strict=True)]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
