"""One style for every picture, and the colours that mean the same wherever they are drawn.

It stands before planning and data because these draw too; figures of results are built on it in strata.results.figures.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PAPER, EMPTY = "#1b2330", "#6a7485", "#ffffff", "#e9edf2"
FROZEN, TRAINED, HEAD = "#3d4a63", "#e07a10", "#1d9a85"
HEAD_RAMP = ("#eaf4f1", "#8ecfc0", "#11695b")  # from nothing to all of it
PARTS_OF_MEMORY = {"weights": FROZEN, "gradients": "#9db9d6", "activations": "#8ecfc0"}
DOTS = "#2f7ab8"

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "strata",
}
PLAIN_TEXT = {"text.parse_math": False}  # for names that others chose: never read as TeX (axes of logarithms need it)
_NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextlib.contextmanager
def style(changes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Pictures made and saved in this block look like all others, but for these changes of matplotlib's settings."""
    import matplotlib

    settings: Any = {**STYLE, **(changes or {})}
    with matplotlib.rc_context(settings):
        yield


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this many inches with one pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def ramp() -> Any:
    """A colour map for shares, from nothing to all."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("strata", list(HEAD_RAMP))


def encoded(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    """As a png, svg or pdf file. No date inside: the same content gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=dpi, metadata=_NO_DATE.get(kind))
    return out.getvalue()


def save(figure: Figure, path: str | Path, dpi: float | None = None) -> None:
    """The ending of `path` decides the format; PNG without one."""
    path = Path(path)
    if not path.suffix:
        path = path.with_name(path.name + ".png")
    kind = path.suffix.lower().removeprefix(".")
    try:
        path.write_bytes(encoded(figure, kind, dpi))
    except OSError as error:
        raise BadInput(f"cannot write the picture to {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:  # an ending that is no format
        raise BadInput(f"cannot write the picture to {str(path)!r}: {error}") from error
