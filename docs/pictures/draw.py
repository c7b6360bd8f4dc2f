"""The pictures of docs/concepts.md, with numbers from Strata itself: `.venv/bin/python docs/pictures/draw.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from sheet import Sheet

import strata
from strata.execution import Execution, memory
from strata.models import resnet20
from strata.ops.tape import Simulation
from strata.planning import Plan

MIB = 2**20
BATCH = 32


def steps(plan: Plan) -> Sheet:
    """What a device holds at some steps of the plan: a bar per layer, as wide as the share of its channels."""
    shown = [plan.steps[n] for n in (0, 1, 3, 5, 7, 10)]
    sheet = Sheet(960, 500, "The layers of ResNet20 at six steps of a plan: frozen below, one trained, a head above")
    sheet.legend(
        92, 34, ("frozen", "frozen: runs, keeps nothing"), ("trained", "trained at full width"),
        ("head", "head: trained, but narrow"), ("ghost", "left out"),
    )  # fmt: skip
    depth, full, height, bottom = plan.graph.depth, 108.0, 13.0, 404.0
    for column, step in enumerate(shown):
        x = 92 + column * 144
        for layer in range(1, depth + 2):  # the last one is the classifier
            y = bottom - layer * (height + 3)
            kind = "frozen" if layer <= step.k_frozen else "trained" if layer <= step.k_trained else "head"
            if layer == depth + 1 or (kind == "head" and step.scale == 1):
                kind = "trained"
            wide = full * (step.scale if kind == "head" else 1)
            sheet.rect(x, y, full, height, "ghost", 3)
            sheet.rect(x + (full - wide) / 2, y, wide, height, kind, 3)
        middle = x + full / 2
        end = step.until_round or 0
        start = (plan.steps[step.step - 1].until_round or 0) if step.step else 0
        sheet.text(middle, bottom + 22, f"step {step.step}", at="middle", bold=True)
        sheet.text(middle, bottom + 40, f"rounds {start}–{end - 1}", "grey", 12, "middle")
        sheet.text(middle, bottom + 57, f"head {step.scale:.2f} wide", "grey", 12, "middle")
        sheet.text(middle, bottom + 74, f"{step.memory_bytes / MIB:.1f} MiB", "accent", 12, "middle")
    top = bottom - (depth + 1) * (height + 3)
    sheet.text(82, top + 11, "classifier", "grey", 12, "end")
    sheet.text(82, bottom - 5, "layer 1", "grey", 12, "end")
    sheet.arrow((62, bottom - 26), (62, top + 26))
    sheet.lines(52, (top + bottom) / 2 - 6, "the\nimage\ngoes up", "grey", 11, "end")
    return sheet


def cut() -> Sheet:
    """Two layers of a model, the channels that a Cut keeps, and the small network that they make."""
    sheet = Sheet(
        960, 400, "A Cut keeps some channels; their weights make a small network, and go back to their places"
    )
    kept, size = (0, 1, 3), 26
    first, second = (8, 3), (4, 8)  # outputs x inputs
    out = (0, 2)
    sheet.text(40, 40, "The server's model", bold=True, size=15)
    sheet.text(40, 62, "weights of two layers: a row per output channel, a column per input channel", "grey", 12)
    _grid(sheet, 60, 130, first, size, set(kept), set(range(3)))
    _grid(sheet, 196, 130, second, size, set(out), set(kept))
    sheet.text(60, 116, "layer 1", "grey", 12)
    sheet.text(196, 116, "layer 2", "grey", 12)
    for row in range(8):
        sheet.text(52, 130 + row * size + 17, str(row), "accent" if row in kept else "grey", 11.5, "end")
    for column in range(8):
        sheet.text(
            196 + column * size + 12, 130 + 4 * size + 16, str(column), "accent" if column in kept else "grey", 11.5,
            "middle",
        )  # fmt: skip
    sheet.lines(196, 290, "What leaves layer 1 enters layer 2:\nthe same channels 0, 1 and 3.", "ink", 12.5)
    sheet.rect(448, 130, 172, 118, "card", 8)
    sheet.text(464, 154, "Cut", bold=True)
    sheet.lines(464, 178, "layer 1\nlayer 2", "grey", 12.5)
    sheet.lines(516, 178, "outputs 0, 1, 3\ninputs 0, 1, 3\noutputs 0, 2", "ink", 12.5)
    sheet.text(464, 238, "indices only, no weights", "grey", 11.5)
    sheet.text(690, 40, "What the device trains", bold=True, size=15)
    sheet.text(690, 62, "an ordinary, smaller network", "grey", 12)
    _grid(sheet, 700, 140, (3, 3), size, {0, 1, 2}, {0, 1, 2})
    _grid(sheet, 826, 140, (2, 3), size, {0, 1}, {0, 1, 2})
    sheet.text(700, 128, "layer 1", "grey", 12)
    sheet.text(826, 128, "layer 2", "grey", 12)
    sheet.path("M420 96C500 78 600 78 684 104", "line", tip=True)
    sheet.text(590, 76, "extract", "ink", 13, "middle", True)
    sheet.path("M760 262C720 346 560 372 214 358", "line", tip=True)
    sheet.text(690, 376, "scatter: back to exactly these places", "ink", 13, "middle", True)
    return sheet


def _grid(
    sheet: Sheet, x: float, y: float, shape: tuple[int, int], size: int, rows: set[int], columns: set[int]
) -> None:
    for row in range(shape[0]):
        for column in range(shape[1]):
            kind = "head" if row in rows and column in columns else "ghost"
            sheet.rect(x + column * size, y + row * size, size - 3, size - 3, kind, 3)


class Recorded(Simulation):
    """Strata's closed form of a training step, which also remembers how much was alive when."""

    history: list[int] = []

    def __init__(self, standing: int, gradients: int = 0) -> None:
        super().__init__(standing, gradients)
        Recorded.history = [self.live]

    def allocate(self, size: int) -> int:
        storage = super().allocate(size)
        if size:  # what is there all the time has a storage of no size
            self.history.append(self.live)
        return storage

    def release(self, storage: int) -> None:
        super().release(storage)
        self.history.append(self.live)


def curves(plan: Plan, number: int) -> tuple[list[int], list[int]]:
    """Live bytes over one training step: of the whole model, and of step `number`."""
    formula = importlib.import_module("strata.execution.simulated")
    formula.Simulation = Recorded  # type: ignore[attr-defined]
    try:
        found = []
        for part in (plan.graph.full(), plan.cut(number)):
            total = memory(plan.graph, part, Execution(BATCH)).total
            assert max(Recorded.history) <= total
            found.append(Recorded.history)
        return found[0], found[1]
    finally:
        formula.Simulation = Simulation  # type: ignore[attr-defined]


def bytes_in_a_step(plan: Plan) -> Sheet:
    """Live bytes through a training step, and what they are made of."""
    number = 7
    sheet = Sheet(
        960, 440, "Live bytes during a training step: a mountain for the whole model, a hill for a step of the plan"
    )
    whole, part = curves(plan, number)
    left, right, bottom, top = 64.0, 560.0, 380.0, 70.0
    most = 55.0

    def y(size: float) -> float:
        return bottom - (bottom - top) * size / MIB / most

    sheet.text(left, 36, "One training step of ResNet20, batch 32", bold=True, size=15)
    for tick in (0, 10, 20, 30, 40, 50):
        sheet.path(f"M{left} {y(tick * MIB):.1f}H{right}", "grid", 1)
        sheet.text(left - 8, y(tick * MIB) + 4, str(tick), "grey", 11.5, "end")
    sheet.text(left - 8, top - 8, "MiB", "grey", 11.5, "end")
    for history, name in ((whole, "full"), (part, "part")):
        points = [(left + (right - left) * i / (len(history) - 1), y(size)) for i, size in enumerate(history)]
        line = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        sheet.path(f"M{left} {bottom}L{line}L{right} {bottom}z", f"{name}-area", 0)
        sheet.path(f"M{line}", f"{name}-line", 1.6)
    sheet.path(f"M{left} {y(plan.budget_bytes):.1f}H{right}", "budget", 1.8, dashes="6 4")
    sheet.text(left + 255, y(plan.budget_bytes) - 8, "budget: 24 MiB", "accent", 12.5, "middle", True)
    sheet.text(left + 255, y(40 * MIB), "whole model", "full-ink", 12.5, "middle", True)
    sheet.text(left + 255, y(9 * MIB), f"step {number} of the plan", "part-ink", 12.5, "middle", True)
    sheet.text((left * 3 + right) / 4, bottom + 24, "forward: layers 1 to 19", "grey", 12, "middle")
    sheet.text((left + right * 3) / 4, bottom + 24, "backward: 19 to 1", "grey", 12, "middle")
    sheet.text(620, 36, "At the highest moment", bold=True, size=15)
    sheet.legend(620, 66, ("weights", "weights"), ("gradients", "gradients"), ("activations", "activations"))
    full = memory(plan.graph, plan.graph.full(), Execution(BATCH))
    one = memory(plan.graph, plan.cut(number), Execution(BATCH))
    for row, (name, found) in enumerate((("whole model", full), (f"step {number}", one))):
        x, line_y = 620.0, 108 + row * 74
        sheet.text(620, line_y, f"{name}: {found.total / MIB:.2f} MiB", size=13)
        for kind in ("weights", "gradients", "activations"):
            wide = 300 * getattr(found, kind) / full.total
            sheet.rect(x, line_y + 10, wide, 22, kind)
            x += wide
    sheet.lines(
        620, 272,
        f"{full.activations / full.total:.0%} of the whole model's bytes are activations:\n"
        "what each layer computed for the batch, kept until\nthe backward pass comes back for it.\n"
        "\nA frozen layer keeps nothing: no gradient is needed\nbelow the first trained layer. A narrow head keeps\n"
        "little. So both make room for one layer in full.",
        "ink", 12.5,
    )  # fmt: skip
    return sheet


def round_trip() -> Sheet:
    """One round, from sampling devices to the checkpoint."""
    sheet = Sheet(960, 400, "One round: sample devices, give each its cut, train, check, average, evaluate, save")
    sheet.rect(40, 60, 880, 96, "card", 10)
    sheet.text(60, 86, "server", bold=True, size=15)
    for index, (name, what) in enumerate((
        ("1  sample", "10 of 100 devices"), ("2  assign", "the method says which Cut"),
        ("5  check", "shape, round, finite"),
        ("6  average", "each weight over those\nwho trained it"),
        ("7  evaluate, save", "a line in metrics.jsonl,\nand a checkpoint"),
    )):  # fmt: skip
        x = 60 + (0, 146, 346, 504, 690)[index]
        sheet.text(x, 116, name, "accent", 13.5, bold=True)
        sheet.lines(x, 134, what, "grey", 11.5)
    for index, frozen in enumerate((2, 2, 0)):
        x = 150 + index * 250
        sheet.rect(x, 226, 170, 140, "card", 10)
        sheet.text(x + 16, 250, f"device {(17, 42, 85)[index]}", bold=True)
        for layer in range(6):
            kind = "frozen" if layer < frozen else "trained" if layer < 3 else "head"
            wide = 64 * (0.3 if kind == "head" else 1)
            sheet.rect(x + 90 + (64 - wide) / 2, 346 - layer * 13, wide, 10, kind, 2)
        sheet.lines(x + 16, 282, f"{(16, 16, 32)[index]} MiB\nits own\nimages", "grey", 11.5)
        sheet.arrow((x + 60, 158), (x + 60, 224))
        sheet.arrow((x + 112, 224), (x + 112, 158))
    sheet.text(202, 196, "3  weights of the Cut", "ink", 12, "end")
    sheet.text(272, 196, "4  train, send the update", "ink", 12)
    sheet.lines(866, 282, "the others\nrest", "grey", 12, "middle")
    sheet.path("M880 60C900 26 860 24 820 24H140C100 24 84 34 84 56", "line", tip=True)
    sheet.text(480, 18, "next round", "grey", 12, "middle")
    return sheet


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "images"
    plan = strata.plan(resnet20(), input_shape=(3, 32, 32), batch_size=BATCH, budget="24 MiB", rounds=500)
    pictures = {"steps": steps(plan), "cut": cut(), "memory": bytes_in_a_step(plan), "round": round_trip()}
    for name, sheet in pictures.items():
        sheet.save(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
