"""Figures for print, PNG and SVG: one column wide, no frame, the page's colours. Text is never read as TeX."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Contents = Mapping[str, Any]
INK, GREY, PAPER, EMPTY = "#1b2330", "#6a7485", "#ffffff", "#e9edf2"
FROZEN, TRAINED, HEAD = "#3d4a63", "#e07a10", "#1d9a85"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.labelcolor": INK, "axes.edgecolor": GREY,
    "axes.linewidth": 0.7, "axes.spines.top": False, "axes.spines.right": False, "xtick.color": GREY,
    "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "axes.grid": True, "grid.color": EMPTY, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "legend.frameon": False, "lines.linewidth": 1.5, "svg.hashsalt": "strata", "svg.fonttype": "none",
    "text.parse_math": False, "figure.facecolor": PAPER, "savefig.facecolor": PAPER,
}  # fmt: skip
AXES = {
    "rounds": ("rounds", "round", 1.0), "upload": ("upload_bytes", "uploaded by all devices, GiB", 2.0**30),
    "flops": ("train_flops", "training operations of all devices, TFLOP", 1e12),
    "seconds": ("seconds", "time of the run, s", 1.0),
}  # fmt: skip


def files(contents: Contents) -> dict[str, bytes]:
    """figures/NAME.png and .svg; what there is nothing to draw of is left out."""
    made: dict[str, bytes] = {}
    for name, draw in _figures(contents):
        with _style():
            figure = draw()
            for ending in ("png", "svg"):
                out = io.BytesIO()
                # no date inside: the same runs give the same file
                figure.savefig(out, format=ending, dpi=300, metadata={"Date": None} if ending == "svg" else None)
                made[f"figures/{name}.{ending}"] = out.getvalue()
    return made


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type,unused-ignore]
        yield


def _figures(contents: Contents) -> Iterator[tuple[str, Callable[[], Figure]]]:
    groups = contents["groups"]
    if any(group["curve"]["rounds"] for group in groups):
        for name in AXES:
            yield f"accuracy-{name}", partial(accuracy, contents, name)
    if any(len(group["memory"]["steps"]) > 1 for group in groups):
        yield "steps", partial(steps, contents)
    for number, group in enumerate(groups):
        stem = f"{number + 1}-{_file_name(group['method'])}"
        if group["memory"]["steps"]:
            yield f"memory-{stem}", partial(memory, group)
        if group["parts"].get("frames"):
            yield f"parameters-{stem}", partial(parameters, group)
    if any(group["per_class"] for group in groups):
        yield "per-class", partial(per_class, contents)
    for number, one in enumerate(contents["data"]):
        if "counts" in one:
            yield f"data-{number + 1}", partial(holdings, one)


def _file_name(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)[:40] or "run"


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def accuracy(contents: Contents, axis: str) -> Figure:
    figure, axes = _new(3.6, 2.5)
    key, label, unit = AXES[axis]
    most = max((x for group in contents["groups"] for x in group["curve"][key]), default=0.0)
    if axis == "upload" and most < 2**30:
        label, unit = label.replace("GiB", "MiB"), 2.0**20
    if axis == "flops" and most < 1e12:
        label, unit = label.replace("TFLOP", "GFLOP"), 1e9
    for group in contents["groups"]:
        curve = group["curve"]
        x, y = [value / unit for value in curve[key]], [100 * value for value in curve["mean"]]
        axes.plot(x, y, color=group["colour"], label=group["label"])
        if any(curve["std"]):
            spread = [100 * (value or 0.0) for value in curve["std"]]
            low = [a - b for a, b in zip(y, spread, strict=True)]
            high = [a + b for a, b in zip(y, spread, strict=True)]
            axes.fill_between(x, low, high, color=group["colour"], alpha=0.16, linewidth=0)
    axes.set(xlabel=label, ylabel="test accuracy, %")
    if axis == "rounds":
        axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if len(contents["groups"]) > 1:
        axes.legend(fontsize=7, handlelength=1.4)
    return figure


def steps(contents: Contents) -> Figure:
    figure, axes = _new(3.6, 2.2)
    for group in contents["groups"]:
        run = group["runs"][0]
        if len(group["memory"]["steps"]) > 1 and run["round"]:
            shown = [float("nan") if step is None else step for step in run["step"]]
            axes.step(run["round"], shown, where="post", color=group["colour"], label=group["label"])
    axes.set(xlabel="round", ylabel="step")
    axes.locator_params(integer=True)
    axes.legend(fontsize=7, handlelength=1.4)
    return figure


def memory(group: Mapping[str, Any]) -> Figure:
    rows, accounting = group["memory"]["steps"], group["memory"]["accounting"]
    figure, axes = _new(3.6, 2.5)
    most = max([*group["memory"]["budgets"], *(row.get(k) or 0 for row in rows for k in ("memory_bytes", "measured"))])
    unit, name = (2**20, "MiB") if most >= 2**20 else (2**10, "KiB")
    numbers, bottom = [row["step"] for row in rows], [0.0] * len(rows)
    for key, label, color in (("weights", "weights", FROZEN), ("gradients", "gradients", "#9db9d6"),
                              ("activations", "activations", "#8ecfc0")):  # fmt: skip
        sizes = [(row.get(f"{key}_bytes") or 0) / unit for row in rows]
        if any(sizes):
            axes.bar(numbers, sizes, bottom=bottom, width=0.8 if len(rows) > 1 else 0.3, color=color,
                     label=f"{label} ({accounting})", linewidth=0)  # fmt: skip
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    known = [(row["step"], row["measured"] / unit) for row in rows if row.get("measured")]
    if known:
        axes.plot(*zip(*known, strict=True), "D", color=INK, markersize=3.5, label="measured, largest device")
    for size in group["memory"]["budgets"]:
        axes.axhline(size / unit, color=TRAINED, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.annotate("budget", (1, size / unit), xycoords=("axes fraction", "data"), xytext=(0, 2),
                      textcoords="offset points", ha="right", color=TRAINED, fontsize=7)  # fmt: skip
    axes.set(xlabel="step", ylabel=name, title=group["label"])
    axes.title.set_fontsize(8)
    axes.set_ylim(0, 1.12 * most / unit)
    axes.set_xticks(numbers if len(numbers) <= 20 else numbers[::5])
    if len(rows) == 1:
        axes.set_xlim(-1, 1)
    figure.legend(loc="outside lower center", ncols=2, fontsize=6.5, handlelength=1.2)
    return figure


def parameters(group: Mapping[str, Any]) -> Figure:
    """Layers over rounds: frozen, trained in full, trained in part (the fuller, the wider)."""
    if group["parts"].get("watched") is not None:
        return channels(group)
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    parts = group["parts"]
    figure, axes = _new(3.6, 2.6)
    frames, depth = parts["frames"], len(parts["layers"])
    ends = [*(frame["round"] for frame in frames[1:]), parts["rounds"]]
    for frame, end in zip(frames, ends, strict=True):
        colours = []
        for layer in frame["layers"]:
            share = layer["share"]
            full = FROZEN if layer["frozen"] else TRAINED if share > 0.999 else HEAD
            strength = 1.0 if layer["frozen"] or share > 0.999 else 0.22 + 0.78 * math.sqrt(share)  # width squared
            mixed = zip(to_rgb(full), to_rgb(EMPTY), strict=True)
            colours.append([strength * a + (1 - strength) * b for a, b in mixed])
        axes.bar([frame["round"]] * depth, [1.0] * depth, bottom=range(depth), width=end - frame["round"], align="edge",
                 color=colours, edgecolor=PAPER, linewidth=0.25)  # fmt: skip
    axes.set(xlabel="round", ylabel="layer", title=group["label"], xlim=(0, parts["rounds"]), ylim=(0, depth))
    axes.title.set_fontsize(8)
    axes.grid(False)
    axes.locator_params(axis="x", integer=True)
    if depth > 1:
        every = 10 if depth > 30 else 5 if depth > 12 else 1
        ticks = [1, *range(every, depth, every)] if every > 1 else list(range(1, depth))
        axes.set_yticks([k - 0.5 for k in (*ticks, depth)], [*map(str, ticks), parts["layers"][-1]["name"]])
    else:
        axes.set_yticks([0.5], [parts["layers"][0]["name"]])
    kinds = ((TRAINED, "trains in full"), (HEAD, "trains in part"), (FROZEN, "frozen"))
    figure.legend(handles=[Patch(color=color, label=label) for color, label in kinds], loc="outside lower center",
                  ncols=3, fontsize=6.5, handlelength=1.0, columnspacing=1.0)  # fmt: skip
    return figure


def channels(group: Mapping[str, Any]) -> Figure:
    """Methods that treat all layers alike: which channels of one layer train in which round, on one device."""
    parts, at = group["parts"], group["parts"]["watched"]
    figure, axes = _new(3.6, 2.4)
    width = parts["layers"][at]["width"]
    ends = [*(frame["round"] for frame in parts["frames"][1:]), parts["rounds"]]
    for frame, end in zip(parts["frames"], ends, strict=True):
        layer = frame["layers"][at]
        for low, high in layer["kept"]:
            axes.bar(frame["round"], (high - low) * width, bottom=low * width, width=end - frame["round"], align="edge",
                     color=TRAINED if layer["share"] > 0.999 else HEAD, edgecolor=PAPER, linewidth=0.2)  # fmt: skip
    drawn = f" ({len(parts['frames'])} of {parts['rounds']} are drawn)" if parts["thinned"] else ""
    axes.set(xlabel=f"round{drawn}", ylabel=f"channel of {parts['layers'][at]['name']}", title=group["label"],
             xlim=(0, parts["rounds"]), ylim=(0, width), facecolor=EMPTY)  # fmt: skip
    axes.title.set_fontsize(8)
    axes.grid(False)
    axes.locator_params(integer=True)
    return figure


def _ramp() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("strata", [EMPTY, "#8ecfc0", "#11695b"])


def per_class(contents: Contents) -> Figure:
    groups = [group for group in contents["groups"] if group["per_class"]]
    most = max(len(group["per_class"]) for group in groups)
    figure, axes = _new(max(3.6, min(7.0, 1.2 + 0.26 * most)), 0.8 + 0.32 * len(groups))
    nan = float("nan")
    values = [[nan if value is None else 100 * value for value in group["per_class"]] for group in groups]
    values = [row + [nan] * (most - len(row)) for row in values]
    axes.imshow(values, cmap=_ramp(), vmin=0, vmax=100, aspect="auto")
    if most <= 20:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if value == value:
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=6.5,
                              color=PAPER if value > 65 else INK)  # fmt: skip
        axes.set_xticks(range(most))
    axes.set_yticks(range(len(groups)), [group["label"] for group in groups])
    axes.set(xlabel="class (test accuracy in %)")
    _bare(axes)
    return figure


def holdings(one: Mapping[str, Any]) -> Figure:
    """A dot per device and class; its area is the number of samples."""
    counts, classes = one["counts"], len(one["classes"])
    figure, axes = _new(max(3.6, min(7.0, 1.0 + 0.06 * len(counts))), max(1.8, min(5.0, 0.8 + 0.17 * classes)))
    most = max((value for row in counts for value in row), default=1) or 1
    dots = [(d, c, value) for d, row in enumerate(counts) for c, value in enumerate(row) if value]
    largest = min(60.0, 2600.0 / max(len(counts), classes))
    axes.scatter([d for d, _, _ in dots], [c for _, c, _ in dots], s=[largest * v / most for _, _, v in dots],
                 color="#2f7ab8", linewidths=0)  # fmt: skip
    axes.set(xlabel="device", ylabel="class", title=f"{one['name']}, {one['partition']}, seed {one['seed']}",
             xlim=(-1, len(counts)), ylim=(-0.7, classes - 0.3))  # fmt: skip
    axes.title.set_fontsize(8)
    if classes <= 30:
        axes.set_yticks(range(classes), one["classes"])
    return figure


def _bare(axes: Axes) -> None:
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


__all__ = ["accuracy", "channels", "files", "holdings", "memory", "parameters", "per_class", "steps"]
