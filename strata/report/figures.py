"""Which figures a report has: PNG and SVG, one column wide, for print, in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.core import pictures
from strata.core.pictures import EMPTY, INK, PAPER, blank
from strata.results.figures import KINDS, band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PageData = Mapping[str, Any]
DPI = 300  # they are small
FROZEN = "#aeb7c4"
STRENGTHS = {
    "weights": 0.95,
    "gradients": 0.6,
    "activations": 0.3,
}  # of the method's colour, which says the method only
LINES, MARKS = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5))), "osD^X"  # of a method that comes several times
PRICES = {  # key of a group, label
    "bytes": ("peak_bytes", "measured peak of a device"),
    "sent": ("upload_bytes", "uploaded by all devices"),
}
AXES = {  # key in a curve, label, and what one unit of the label is
    "rounds": ("rounds", "round", 1.0),
    "upload": ("upload_bytes", "uploaded by all devices, GiB", 2.0**30),
    "flops": ("train_flops", "training operations of all devices, TFLOP", 1e12),
    "seconds": ("seconds", "time of the run, s", 1.0),
}


def files(data: PageData) -> dict[str, bytes]:
    """figures/NAME.png and .svg; what there is nothing to draw of is left out."""
    made: dict[str, bytes] = {}
    for name, draw in _figures(data):
        with pictures.style(pictures.PLAIN_TEXT):
            figure = draw()
            for kind in KINDS:
                made[f"figures/{name}.{kind}"] = pictures.encoded(figure, kind, DPI)
    return made


def _figures(data: PageData) -> Iterator[tuple[str, Callable[[], Figure]]]:
    groups = data["groups"]
    if any(group["curve"]["rounds"] for group in groups):
        for name in AXES:
            yield f"accuracy-{name}", partial(accuracy, data, name)
    if len(_judged(groups)) > 1:
        for name in PRICES:
            yield f"accuracy-{name}", partial(price, data, name)
    if any(len(group["memory"]["steps"]) > 1 for group in groups):
        yield "steps", partial(steps, data)
    for number, group in enumerate(groups):
        stem = f"{number + 1}-{_file_name(group['method'])}"
        if group["memory"]["steps"]:
            yield f"memory-{stem}", partial(memory, group)
        if group["parts"].get("frames"):
            yield f"parameters-{stem}", partial(parameters, group)
    if any(group["per_class"] for group in groups):
        yield "per-class", partial(per_class, data)
    for number, one in enumerate(data["data"]):
        if "counts" in one:
            yield f"data-{number + 1}", partial(holdings, one)


def _file_name(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)[:40] or "run"


def accuracy(data: PageData, axis: str) -> Figure:
    figure, axes = blank(3.6, 2.5)
    key, label, unit = AXES[axis]
    most = max((x for group in data["groups"] for x in group["curve"][key]), default=0.0)
    if axis == "upload" and most < 2**30:
        label, unit = label.replace("GiB", "MiB"), 2.0**20
    if axis == "flops" and most < 1e12:
        label, unit = label.replace("TFLOP", "GFLOP"), 1e9
    for group in data["groups"]:
        curve = group["curve"]
        x, y = [value / unit for value in curve[key]], [100 * value for value in curve["mean"]]
        spread = [100 * (value or 0.0) for value in curve["std"]]
        line = LINES[group["nth"] % len(LINES)]
        band(axes, x, y, spread, color=group["colour"], linestyle=line, label=group["label"])
    axes.set(xlabel=label, ylabel="test accuracy, %")
    if axis == "rounds":
        axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if len(data["groups"]) > 1:
        axes.legend()
    return figure


def _judged(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [group for group in groups if group["accuracy"] is not None and group["peak_bytes"]]


def price(data: PageData, name: str) -> Figure:
    """Accuracy against what it costs: a point for each group."""
    key, label = PRICES[name]
    figure, axes = blank(3.6, 2.5)
    groups = [group for group in _judged(data["groups"]) if group[key]]
    most = max(group[key] for group in groups)
    unit, unit_name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB") if most >= 2**20 else (2**10, "KiB")
    for group in groups:
        x, y, spread = group[key] / unit, 100 * group["accuracy"], 100 * (group["accuracy_std"] or 0)
        mark = MARKS[group["nth"] % len(MARKS)]
        axes.errorbar([x], [y], [spread] if spread else None, fmt=mark, color=group["colour"], markersize=6, capsize=2)
        right = group[key] > 0.6 * most
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if right else "left", "va": "center"}
        axes.annotate(group["label"], (x, y), (-7 if right else 7, 0), fontsize=7, color=INK, **place)
    axes.set(xlabel=f"{label}, {unit_name}", ylabel="test accuracy, %", xlim=(0, 1.1 * most / unit))
    axes.margins(y=0.2)
    return figure


def steps(data: PageData) -> Figure:
    figure, axes = blank(3.6, 2.2)
    for group in data["groups"]:
        run = group["runs"][0]
        if len(group["memory"]["steps"]) > 1 and run["round"]:
            shown = [float("nan") if step is None else step for step in run["step"]]
            axes.step(run["round"], shown, where="post", color=group["colour"], label=group["label"])
    axes.set(xlabel="round", ylabel="step")
    axes.locator_params(integer=True)
    axes.legend()
    return figure


def memory(group: Mapping[str, Any]) -> Figure:
    rows, accounting = group["memory"]["steps"], group["memory"]["accounting"]
    figure, axes = blank(3.6, 2.5)
    most = max([*group["memory"]["budgets"], *(row.get(k) or 0 for row in rows for k in ("memory_bytes", "measured"))])
    unit, unit_name = (2**20, "MiB") if most >= 2**20 else (2**10, "KiB")
    numbers, bottom = [row["step"] for row in rows], [0.0] * len(rows)
    for part, strength in STRENGTHS.items():
        colour = _mixed(group["colour"], strength, PAPER)
        sizes = [(row.get(f"{part}_bytes") or 0) / unit for row in rows]
        if any(sizes):
            width = 0.8 if len(rows) > 1 else 0.3
            name = f"{part} ({accounting})"
            axes.bar(numbers, sizes, bottom=bottom, width=width, color=colour, label=name, linewidth=0)
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    known = [(row["step"], row["measured"] / unit) for row in rows if row.get("measured")]
    if known:
        axes.plot(*zip(*known, strict=True), "D", color=INK, markersize=3.5, label="measured, largest device")
    for size in group["memory"]["budgets"]:
        axes.axhline(size / unit, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate("budget", (1, size / unit), xytext=(0, 2), ha="right", color=INK, fontsize=8, **place)
    axes.set_axisbelow(True)
    axes.set(xlabel="step", ylabel=unit_name, title=group["label"])
    axes.set_ylim(0, 1.12 * most / unit)
    axes.set_xticks(numbers if len(numbers) <= 20 else numbers[::5])
    if len(rows) == 1:
        axes.set_xlim(-1, 1)
    figure.legend(loc="outside lower center", ncols=2, handlelength=1.2)
    return figure


def parameters(group: Mapping[str, Any]) -> Figure:
    """Layers over rounds: frozen, trained in full, trained in part (the fuller, the wider)."""
    if group["parts"].get("watched") is not None:
        return channels(group)
    from matplotlib.patches import Patch

    parts = group["parts"]
    figure, axes = blank(3.6, 2.6)
    frames, depth = parts["frames"], len(parts["layers"])
    ends = [*(frame["round"] for frame in frames[1:]), parts["rounds"]]
    for frame, end in zip(frames, ends, strict=True):
        colours = []
        for layer in frame["layers"]:
            share = layer["share"]
            full = FROZEN if layer["frozen"] else group["colour"]
            strength = 1.0 if layer["frozen"] or share > 0.999 else 0.22 + 0.78 * math.sqrt(share)  # width squared
            colours.append(_mixed(full, strength, EMPTY))
        box: dict[str, Any] = {"align": "edge", "edgecolor": PAPER, "linewidth": 0.25}
        start, width = frame["round"], end - frame["round"]
        axes.bar([start] * depth, [1.0] * depth, bottom=range(depth), width=width, color=colours, **box)
    axes.set(xlabel="round", ylabel="layer", title=group["label"], xlim=(0, parts["rounds"]), ylim=(0, depth))
    axes.grid(False)
    axes.locator_params(axis="x", integer=True)
    if depth > 1:
        every = 10 if depth > 30 else 5 if depth > 12 else 1
        ticks = [1, *range(every, depth, every)] if every > 1 else list(range(1, depth))
        axes.set_yticks([k - 0.5 for k in (*ticks, depth)], [*map(str, ticks), parts["layers"][-1]["name"]])
    else:
        axes.set_yticks([0.5], [parts["layers"][0]["name"]])
    part = _mixed(group["colour"], 0.45, EMPTY)
    kinds = ((group["colour"], "trains in full"), (part, "trains in part"), (FROZEN, "frozen"))
    handles = [Patch(color=color, label=label) for color, label in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=1.0, columnspacing=1.0)
    return figure


def channels(group: Mapping[str, Any]) -> Figure:
    """Methods that treat all layers alike: which channels of one layer train in which round, on one device."""
    parts, at = group["parts"], group["parts"]["watched"]
    figure, axes = blank(3.6, 2.4)
    width = parts["layers"][at]["width"]
    ends = [*(frame["round"] for frame in parts["frames"][1:]), parts["rounds"]]
    for frame, end in zip(parts["frames"], ends, strict=True):
        layer = frame["layers"][at]
        box: dict[str, Any] = {"width": end - frame["round"], "align": "edge", "edgecolor": PAPER, "linewidth": 0.2}
        for low, high in layer["kept"]:
            axes.bar(frame["round"], (high - low) * width, bottom=low * width, color=group["colour"], **box)
    drawn = f" ({len(parts['frames'])} of {parts['rounds']} are drawn)" if parts["thinned"] else ""
    axes.set(xlabel=f"round{drawn}", ylabel=f"channel of {parts['layers'][at]['name']}", title=group["label"])
    axes.set(xlim=(0, parts["rounds"]), ylim=(0, width), facecolor=EMPTY)
    axes.grid(False)
    axes.locator_params(integer=True)
    return figure


def per_class(data: PageData) -> Figure:
    groups = [group for group in data["groups"] if group["per_class"]]
    most = max(len(group["per_class"]) for group in groups)
    figure, axes = blank(max(3.6, min(7.0, 1.2 + 0.26 * most)), 0.8 + 0.32 * len(groups))
    nan = float("nan")
    values = [[nan if value is None else 100 * value for value in group["per_class"]] for group in groups]
    values = [row + [nan] * (most - len(row)) for row in values]
    axes.imshow(values, cmap="Greys", vmin=0, vmax=100, aspect="auto")
    if most <= 20:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if not math.isnan(value):
                    colour = PAPER if value > 65 else INK
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)
        axes.set_xticks(range(most))
    axes.set_yticks(range(len(groups)), [group["label"] for group in groups])
    axes.set(xlabel="class (test accuracy in %)")
    _bare(axes)
    return figure


def holdings(one: Mapping[str, Any]) -> Figure:
    import numpy as np

    from strata.data.distribution import draw

    size = max(3.6, min(7.0, 1.0 + 0.06 * len(one["counts"]))), max(1.8, min(5.0, 0.8 + 0.17 * len(one["classes"])))
    figure, axes = blank(*size)
    draw(axes, np.asarray(one["counts"]), one["classes"], largest=60.0)
    axes.set(title=f"{one['name']}, {one['partition']}, seed {one['seed']}")
    return figure


def _mixed(colour: str, strength: float, ground: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    one, other, three = (strength * a + (1 - strength) * b for a, b in zip(to_rgb(colour), to_rgb(ground), strict=True))
    return one, other, three


def _bare(axes: Axes) -> None:
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


__all__ = ["accuracy", "channels", "files", "holdings", "memory", "parameters", "per_class", "price", "steps"]
