"""A plan as a table that people can read."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata.core.sizes import show_bytes
from strata.graph.inputs import show_input
from strata.planning.plans import kept_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.planning.plans import Plan, Step

BAR = 10  # characters for a full budget
WIDTH = 100  # of str(plan), and of the table with all its columns; narrower ones do without bar and upload


def render(plan: Plan) -> str:
    """Plain text, the same everywhere."""
    out = StringIO()
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False).print(renderable(plan))
    return out.getvalue().rstrip("\n")


def renderable(plan: Plan, width: int = WIDTH, scratch: Sequence[int] | None = None) -> RenderableType:
    """`scratch`: what libraries take beside each step on this machine, where that is known."""
    return Group(_heading(plan), _steps(plan, width >= WIDTH, scratch), *_notes(plan, scratch))


def _heading(plan: Plan) -> Text:
    share = plan.budget_bytes / plan.full_bytes
    return Text.assemble(
        (plan.model, "bold"),
        f": {plan.classes} classes, input {show_input(plan.input_shape)}, batch {plan.batch}\n"
        f"budget {show_bytes(plan.budget_bytes)}, {share:.1%} of the {show_bytes(plan.full_bytes)} that training the "
        f"whole model needs ({plan.accounting} accounting{', library scratch within the budget' * bool(plan.reserve)})",
    )


def _steps(plan: Plan, wide: bool, scratch: Sequence[int] | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    left_out = {*(() if wide else ("upload",)), *(() if scratch else ("scratch",))}
    names = ("step", "rounds", "frozen", "in full", "head", "memory", "scratch", "of budget", "trained", "upload")
    for name in (*names, "MFLOP"):
        if name not in left_out:
            table.add_column(name, justify="left" if wide and name == "of budget" else "right", no_wrap=True)
    start = 0
    for step in plan.steps:
        share = step.memory_bytes / plan.budget_bytes
        cells = (
            str(step.step),
            _rounds(start, step),
            _layers(1, step.k_frozen),
            _layers(step.k_frozen + 1, step.k_trained),
            "none" if step.k_trained == plan.graph.depth else f"{step.scale:.3f}",
            show_bytes(step.memory_bytes),
            *([show_bytes(scratch[step.step])] if scratch else []),
            _bar(share) if wide else f"{share:.0%}",
            f"{step.trained_parameters:,}",
            *([show_bytes(step.upload_bytes)] if wide else []),
            f"{step.train_flops_per_sample / 1e6:,.1f}",
        )
        table.add_row(*cells, style="dim" if step.step in plan.skipped else None)
        start = step.until_round or 0
    return table


def _executions(plan: Plan) -> list[str]:
    """Steps that follow each other and are taken alike share a line."""
    said: list[tuple[str, list[int]]] = []
    for number, step in enumerate(plan.steps):
        how = str(plan.execution_at(number))
        if not said or said[-1][0] != how:
            said.append((how, []))
        said[-1][1].append(step.step)
    return [f"Step {_layers(steps[0], steps[-1])}: {how}." for how, steps in said]


def _rounds(start: int, step: Step) -> str:
    if step.until_round is None:
        return "open"
    if step.until_round == start:
        return "none"
    return str(start) if step.until_round == start + 1 else f"{start}–{step.until_round - 1}"


def _layers(first: int, last: int) -> str:
    return "–" if last < first else str(first) if first == last else f"{first}–{last}"


def _bar(share: float) -> str:
    filled = round(share * BAR)
    return f"{'█' * min(filled, BAR)}{'·' * (BAR - filled)} {share:>4.0%}"


def _notes(plan: Plan, scratch: Sequence[int] | None) -> list[Text]:
    notes = []
    if len(plan.steps) == 1:
        notes.append("The whole model fits the budget: it trains as it is, in one step.")
    else:
        notes.append(
            f"Step 0 pre-trains the thin model; from step {plan.steps[-1].step} on, the rest trains at full width."
        )
    if any(step.execution for step in plan.steps):
        notes += _executions(plan)
    activations = sum(step.activations_bytes for step in plan.steps) / sum(step.memory_bytes for step in plan.steps)
    notes.append(
        f"Activations are {activations:.0%} of the memory; the rest is weights and gradients. MFLOP: to train a sample."
    )
    mapped = max(step.mapped_bytes for step in plan.steps)
    if mapped:
        notes.append(
            f"Up to {show_bytes(mapped)} of frozen weights are in a mapped file: they need not stay in memory."
        )
    kept = max(step.kept_bytes_per_sample for step in plan.steps)
    if kept:
        notes.append(kept_note(kept))
    if scratch and plan.accounting == "peak":
        total, step = max((step.memory_bytes + scratch[step.step], step.step) for step in plan.steps)
        notes.append(
            f"With library scratch (measured here) a step takes up to {show_bytes(total)}, at step {step}: "
            + (
                "within the budget."
                if total <= plan.budget_bytes
                else "more than the budget; --reserve scratch counts it."
            )
        )
    if plan.schedule == "early-stopping":
        notes.append(f"The next step begins after {plan.patience} rounds without better accuracy (early-stopping).")
    if plan.skipped:
        listed = ", ".join(map(str, plan.skipped))
        notes.append(f"{plan.rounds} rounds are few: no round is left for step {listed}, skipped.")
    for number, level in enumerate(plan.levels):
        ratio = "" if level.constraint is None else f" (constraint {level.constraint:g})"
        frozen = " ".join(map(str, level.k_frozen))
        notes.append(f"Level {number}, {show_bytes(level.budget_bytes)}{ratio}: frozen layers per step {frozen}")
    return [Text(note) for note in notes]
