"""A Fit as a table that people can read, and as a picture of bytes against cost."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata.core.pictures import DOTS, GREY, INK, blank, save, style
from strata.core.sizes import show_bytes, show_exactly
from strata.graph.inputs import show_input

if TYPE_CHECKING:
    from strata.execution.execution import Execution
    from strata.planning.fit import Fit, Way

WIDTH = 160


def render(fit: Fit) -> str:
    """Plain text, the same everywhere."""
    out = StringIO()
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(renderable(fit))
    return out.getvalue().rstrip("\n")


def renderable(fit: Fit) -> RenderableType:
    table = [_table(fit)] if any(way.fits for way in fit.ways) else []
    return Group(_heading(fit), *table, *(Text(line, overflow="fold") for line in _notes(fit)))


def _heading(fit: Fit) -> Text:
    budgets = ", ".join(map(show_bytes, fit.budgets))
    return Text.assemble(
        (fit.model, "bold"),
        f": input {show_input(fit.input_shape)}, batch {fit.batch}, {fit.rounds} rounds\n"
        f"budget {budgets}; training the whole model plainly needs {show_bytes(fit.full_bytes)}",
    )


def _table(fit: Fit) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    piloted = any(way.accuracy is not None for way in fit.ways)
    mapped = any(way.mapped_bytes for way in fit.ways)
    names = ["", "method", "setting", "execution", "peak", *(["mapped"] if mapped else []), "trained", "TFLOP"]
    for name in (*names, "up/round", "down/round", "up", "down", "minutes", *(["pilot"] if piloted else []), ""):
        left = name in ("", "method", "setting", "execution")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "execution")
    for number, way in enumerate(fit.ways):
        if way.fits:
            table.add_row(
                *_cells(fit, number, way, mapped, piloted), style="dim" if way.beaten_by is not None else None
            )
    return table


def _cells(fit: Fit, number: int, way: Way, mapped: bool, piloted: bool) -> list[str]:
    file = [show_bytes(way.mapped_bytes) if way.mapped_bytes else ""] if mapped else []
    each = fit.rounds * fit.per_round
    marks = "recommended" if number == fit.recommended else ""
    if way.beaten_by is not None:
        marks = f"{marks + ', ' if marks else ''}beaten by {fit.ways[way.beaten_by].method}"
    pilot = ["" if way.accuracy is None else f"{way.accuracy:.1%}"] if piloted else []
    return [
        "*" if number == fit.recommended else "",
        way.method,
        way.setting,
        "; ".join(dict.fromkeys(map(_short, [level.execution for level in way.levels] or [way.execution]))),
        ", ".join(dict.fromkeys(show_bytes(level.peak_bytes) for level in way.levels)) or show_bytes(way.peak_bytes),
        *file,
        f"{way.trained_share:.0%}",
        f"{way.train_flops / 1e12:,.3g}",
        show_bytes(way.upload_bytes // each),
        show_bytes(way.download_bytes // each),
        show_bytes(way.upload_bytes),
        show_bytes(way.download_bytes),
        "" if way.minutes is None else f"{way.minutes:,.1f}",
        *pilot,
        marks,
    ]


def _short(execution: Execution) -> str:
    return str(replace(execution, frozen_weights="memory")).removeprefix("batch ").replace(", activations", ",")


def _notes(fit: Fit) -> list[str]:
    notes = [_what_is_lacking(way) for way in fit.ways if not way.fits]
    if any(way.mapped_bytes for way in fit.ways):
        notes.append("Mapped: weights of frozen layers, in a file of the device beside its peak.")
    if any(way.norm_samples for way in fit.ways):
        notes.append("The whole model takes few samples at a time; the others are shown with at least twice as many.")
    if len(fit.budgets) > 1:
        notes.append("Peak and execution: of the devices of each budget that take part, the weakest first.")
    if fit.recommended is not None:
        notes.append(f"Per round: one device; in all: {fit.per_round} devices a round with {fit.samples} samples each.")
        if fit.time_on:
            notes.append(f"Minutes are an estimate: {fit.time_on}.")
    best = fit.best
    notes.append(fit.reason[0].upper() + fit.reason[1:] + "." if best is None else f"Take {best.method}: {fit.reason}.")
    return [*notes, best.command] if best is not None and best.command else notes


def _what_is_lacking(way: Way) -> str:
    need, more = show_bytes(way.peak_bytes), show_exactly(way.short_bytes or 0)
    if way.ceiling:
        return f"{way.method} is above the ceiling of {way.ceiling}, though {need} would do for it."
    remedy = f"; with {way.remedy} it would fit" if way.remedy else ""
    return f"{way.method} does not fit: it needs {need} at the least, {more} more{remedy}."


def save_picture(fit: Fit, path: str | Path) -> None:
    """Bytes against FLOPs, of every way that fits; the frontier is what none beats."""
    with style():
        figure, axes = blank(5.6, 3.6)
        ways = [(number, way) for number, way in enumerate(fit.ways) if way.fits]
        free = sorted((way.peak_bytes / 2**20, way.train_flops / 1e12) for _, way in ways if way.beaten_by is None)
        axes.plot(*zip(*free, strict=True), color=GREY, linewidth=1, zorder=1) if free else None
        labels: dict[tuple[float, float], list[str]] = {}
        for number, way in ways:
            place = (way.peak_bytes / 2**20, way.train_flops / 1e12)
            chosen = number == fit.recommended
            colour = INK if chosen else DOTS if way.beaten_by is None else GREY
            axes.scatter(*place, s=60 if chosen else 26, color=colour, zorder=2)
            labels.setdefault(place, []).append(way.method)
        for place, names in labels.items():
            axes.annotate(", ".join(names), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
        for budget in sorted(set(fit.budgets)):
            axes.axvline(budget / 2**20, color=GREY, linestyle=":", linewidth=1)
        axes.set_xlabel("true peak of a device, MiB (dotted: the budget)")
        axes.set_ylabel(f"TFLOP in {fit.rounds} rounds")
        axes.set_title(f"{fit.model}: what fits, and what it costs")
        axes.margins(0.15)
        save(figure, path)
