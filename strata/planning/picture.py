"""A plan as a picture: layers over rounds, and beside it what each step takes of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from strata.core import pictures
from strata.core.errors import BadInput
from strata.core.pictures import FROZEN, GREY, INK, PAPER, PARTS_OF_MEMORY, TRAINED
from strata.core.sizes import show_bytes
from strata.graph.inputs import show_input

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from strata.planning.plans import Plan

HEAD = pictures.ramp()
FORMATS = (".png", ".svg", ".pdf")
STYLE = {"font.size": 10, "axes.labelsize": 10, "legend.fontsize": 10, "axes.grid": False}  # a picture of its own page


def save_picture(plan: Plan, path: str | Path) -> None:
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"a picture is a {', '.join(FORMATS)} file, such as plan.png, not {path.name!r}")
    with pictures.style(STYLE):
        pictures.save(draw(plan), path, dpi=160)


def draw(plan: Plan) -> Figure:
    figure = Figure(figsize=(13, 6.6))
    grid = figure.add_gridspec(
        1, 2, width_ratios=(2.15, 1), left=0.085, right=0.975, bottom=0.17, top=0.83, wspace=0.12
    )
    layers, memory = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    _titles(figure, plan)
    _draw_layers(layers, plan)
    _draw_memory(memory, plan)
    _legends(figure, layers, memory)
    return figure


def _titles(figure: Figure, plan: Plan) -> None:
    figure.text(
        0.085, 0.945, f"{plan.model} within {show_bytes(plan.budget_bytes)}", fontsize=17, weight="bold", color=INK
    )
    last = plan.steps[-1].step
    figure.text(
        0.085,
        0.902,
        f"{plan.budget_bytes / plan.full_bytes:.1%} of what training the whole model needs · {last} steps after "
        f"pre-training · {plan.classes} classes, input {show_input(plan.input_shape)}, batch {plan.batch} · "
        f"{plan.accounting} accounting, {plan.schedule} schedule",
        color=GREY,
    )


def _columns(plan: Plan) -> list[tuple[float, float]]:
    """Where each step begins and ends on the horizontal axis: in rounds, or in steps where rounds are open."""
    if plan.schedule == "early-stopping":
        return [(n, n + 1) for n in range(len(plan.steps))]
    ends = [step.until_round or 0 for step in plan.steps]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _draw_layers(axes: Axes, plan: Plan) -> None:
    depth, columns = plan.graph.depth, _columns(plan)
    right = columns[-1][1]
    label_from = 0.028 * right  # columns at least this wide carry their width as a number
    for step, (start, end) in zip(plan.steps, columns, strict=True):
        if end == start:
            continue
        box: dict[str, Any] = {"width": end - start, "align": "edge", "edgecolor": PAPER, "linewidth": 0.6}
        axes.bar(start, step.k_frozen, color=FROZEN, **box)
        axes.bar(start, step.k_trained - step.k_frozen, bottom=step.k_frozen, color=TRAINED, **box)
        axes.bar(start, depth - step.k_trained, bottom=step.k_trained, color=HEAD(step.scale), **box)
        axes.bar(start, 1, bottom=depth, color=TRAINED, **box)  # the classifier trains throughout
        head = depth - step.k_trained
        if end - start >= label_from and head >= 0.04 * depth:
            axes.text(
                (start + end) / 2,
                step.k_trained + head / 2,
                f"{step.scale:.2g}",
                ha="center",
                va="center",
                fontsize=8.5,
                color=PAPER if step.scale > 0.7 else INK,
                rotation=90 if end - start < 0.045 * right else 0,
            )
    for y in range(1, depth + 1):  # the seams between layers
        axes.axhline(y, color=PAPER, linewidth=0.5 if depth < 45 else 0.3, alpha=0.55)
    for level in plan.levels:
        if level.budget_bytes > plan.budget_bytes:
            xs = [columns[0][0], *(end for _, end in columns)]
            axes.stairs(level.k_frozen, xs, baseline=None, color=PAPER, linewidth=1.6, linestyle=(0, (3, 1.5)))
            name = show_bytes(level.budget_bytes) if level.constraint is None else f"{level.constraint:g}"
            axes.annotate(
                f"devices of {name} freeze up to here",
                (right, level.k_frozen[-1]),
                xytext=(-5, 2),
                textcoords="offset points",
                color=PAPER,
                fontsize=8,
                weight="bold",
                ha="right",
            )
    axes.set_xlim(0, right)
    axes.set_ylim(0, depth + 1)
    ticks = [1, *(int(k) for k in MaxNLocator(8, integer=True).tick_values(1, depth) if 1 < k < 0.93 * depth), depth]
    if depth > 30:
        ticks.pop()  # no room beside the classifier
    axes.set_yticks([k - 0.5 for k in (*ticks, depth + 1)], [*map(str, ticks), "classifier"])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylabel("layer", color=INK)
    by_accuracy = plan.schedule == "early-stopping"
    axes.set_xlabel("step (its rounds are decided in training)" if by_accuracy else "round", color=INK)
    _plain(axes)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    unit, name = (2**20, "MiB") if plan.budget_bytes >= 2**20 else (2**10, "KiB")
    numbers = [step.step for step in plan.steps]
    left = [0.0] * len(numbers)
    for part, color in PARTS_OF_MEMORY.items():
        sizes = [getattr(step, f"{part}_bytes") / unit for step in plan.steps]
        axes.barh(numbers, sizes, left=left, height=0.78, color=color, edgecolor=PAPER, linewidth=0.4)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    budget = plan.budget_bytes / unit
    axes.axvline(budget, color=TRAINED, linewidth=1.8)
    axes.annotate(
        "budget",
        (budget, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        color=TRAINED,
        weight="bold",
        fontsize=9,
    )
    size = min(8.5, 210 / max(len(numbers), 1))
    for step, total in zip(plan.steps, left, strict=True):
        axes.text(
            min(total, budget) - 0.012 * budget,
            step.step,
            f"{step.memory_bytes / plan.budget_bytes:.0%}",
            ha="right",
            va="center",
            fontsize=size,
            color=INK,
        )
    axes.set_xlim(0, budget * 1.04)
    axes.set_ylim(-0.6, max(numbers) + 0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_ylabel("step", color=INK)
    axes.set_xlabel(f"{name} in a training step (whole model: {plan.full_bytes / unit:.1f})", color=INK)
    _plain(axes)


def _legends(figure: Figure, layers: Axes, memory: Axes) -> None:
    handles = [Patch(color=FROZEN, label="frozen"), Patch(color=TRAINED, label="being trained, full width")]
    style: dict[str, Any] = {
        "frameon": False,
        "handlelength": 1.2,
        "handleheight": 1.0,
        "labelcolor": INK,
        "borderaxespad": 0,
    }
    layers.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.115), ncols=2, **style)
    memory.legend(
        handles=[Patch(color=color, label=part) for part, color in PARTS_OF_MEMORY.items()],
        loc="upper left",
        bbox_to_anchor=(0, -0.115),
        ncols=3,
        columnspacing=1.2,
        **style,
    )
    bar = figure.add_axes((0.485, 0.062, 0.14, 0.022))
    figure.colorbar(ScalarMappable(Normalize(0, 1), HEAD), cax=bar, orientation="horizontal")
    bar.set_xticks([0, 0.5, 1])
    bar.tick_params(length=0, labelsize=8, colors=INK, pad=2)
    bar.text(-0.06, 0.5, "head, by width", transform=bar.transAxes, ha="right", va="center", color=INK)
    for spine in bar.spines.values():
        spine.set_visible(False)


def _plain(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
