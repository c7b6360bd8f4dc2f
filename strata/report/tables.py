"""The same tables as CSV (exact numbers), Markdown and LaTeX (rounded, to be read)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core.sizes import show_bytes

Contents = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """`rows` hold exact values; `shown` the same for readers, in the same order of `head`."""

    head: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    caption: str = ""
    shown_head: tuple[str, ...] = ()
    shown: tuple[tuple[str, ...], ...] = ()


def summary(contents: Contents) -> Table:
    head = ("method", "status", "rounds_done", "rounds", "seeds", "accuracy_mean", "accuracy_std", "best_accuracy",
            "peak_bytes", "upload_bytes", "download_bytes", "train_flops", "seconds", "dropped", "runs",
            "counted")  # fmt: skip
    rows, shown = [], []
    for group in contents["groups"]:
        done, seeds, runs = f"{group['at']}/{group['rounds']}", len(group["counted"]), len(group["seeds"])
        rows.append((
            group["label"], group["status"], group["at"], group["rounds"], seeds, group["accuracy"],
            group["accuracy_std"], group["best"], group["peak_bytes"], group["upload_bytes"], group["download_bytes"],
            group["train_flops"], group["seconds"], group["dropped"], runs, group["basis"],
        ))  # fmt: skip
        shown.append((
            group["label"], accuracy_text(group), done, f"{seeds} of {runs}" if seeds < runs else str(seeds),
            _size(group["peak_bytes"]),
            _size(group["upload_bytes"]), _size(group["download_bytes"]), _tera(group["train_flops"]),
        ))  # fmt: skip
    caption = f"Test accuracy, mean ± standard deviation over seeds. {', '.join(contents['lead'])}."
    return Table(head, rows, caption,
                 ("method", "accuracy in %", "rounds", "seeds", "largest device", "upload", "download", "TFLOP"),
                 tuple(shown))  # fmt: skip


def steps(contents: Contents) -> Table:
    head = ("method", "step", "scale", "trained_parameters", "accounting", "memory_bytes", "weights_bytes",
            "gradients_bytes", "activations_bytes", "measured_peak_bytes")  # fmt: skip
    rows = [
        (group["label"], step["step"], step.get("scale"), step.get("trained_parameters"), group["memory"]["accounting"],
         *(step.get(key) for key in ("memory_bytes", "weights_bytes", "gradients_bytes", "activations_bytes")),
         step.get("measured"))
        for group in contents["groups"] for step in group["memory"]["steps"]
    ]  # fmt: skip
    shown = tuple(
        (str(row[0]), str(row[1]), "–" if row[2] is None else f"{row[2]:g}", _size(row[5]), str(row[4] or "–"),
         _size(row[9]))
        for row in rows
    )  # fmt: skip
    return Table(head, rows, "Memory of each step: as accounted, and measured at the largest device.",
                 ("method", "step", "scale", "accounted", "accounting", "measured"), shown)  # fmt: skip


def per_class(contents: Contents) -> Table:
    groups = [group for group in contents["groups"] if group["per_class"]]
    most = max((len(group["per_class"]) for group in groups), default=0)
    known = (one.get("classes", []) for one in contents["data"])
    names = next((names for names in known if len(names) == most), None) or range(most)
    rows: list[tuple[Any, ...]] = [
        (str(name), *(group["per_class"][c] if c < len(group["per_class"]) else None for group in groups))
        for c, name in enumerate(names)
    ]
    head = ("class", *(group["label"] for group in groups))
    shown = tuple((row[0], *("–" if v is None else f"{100 * v:.1f}" for v in row[1:])) for row in rows)
    return Table(head, rows, "Test accuracy per class in %, of the final model.", head, shown)


def rounds(contents: Contents) -> Table:
    """Every round of every run: for one's own plots."""
    keys = ("round", "step", "accuracy", "train_loss", "lr", "upload_bytes", "download_bytes", "train_flops",
            "peak_bytes", "seconds", "dropped")  # fmt: skip
    rows = [
        (group["label"], run["name"], run["seed"], *values)
        for group in contents["groups"] for run in group["runs"]
        for values in zip(*(run[key] for key in keys), strict=True)
    ]  # fmt: skip
    return Table(("method", "run", "seed", *keys), rows)


TABLES = {"summary": summary, "steps": steps, "per-class": per_class, "rounds": rounds}


def files(contents: Contents) -> dict[str, bytes]:
    """tables/NAME.csv and, where it is short enough to be read, .md and .tex."""
    made: dict[str, bytes] = {}
    for name, make in TABLES.items():
        table = make(contents)
        made[f"tables/{name}.csv"] = to_csv(table).encode()
        if table.shown_head:
            made[f"tables/{name}.md"] = to_markdown(table).encode()
            made[f"tables/{name}.tex"] = to_latex(table).encode()
    return made


def to_csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in (table.head, *table.rows):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A name that a spreadsheet would run as a formula is marked as text."""
    if isinstance(value, str):
        return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
    return "" if value is None else value


def to_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"

    rule = "| --- |" + " ---: |" * (len(table.shown_head) - 1)
    return "\n".join([line(table.shown_head), rule, *map(line, table.shown), "", _markdown(table.caption), ""])


def to_latex(table: Table) -> str:
    """For \\input, with booktabs."""
    body = [" & ".join(map(_latex, row)) + r" \\" for row in table.shown]
    return "\n".join([
        r"\begin{table}", r"  \centering", rf"  \caption{{{_latex(table.caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(table.shown_head) - 1)}}}", r"    \toprule",
        "    " + " & ".join(map(_latex, table.shown_head)) + r" \\", r"    \midrule", *(f"    {row}" for row in body),
        r"    \bottomrule", r"  \end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>|#~$"}) | {10: " ", 13: " "}
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "·": r"$\cdot$", "\n": " ",
    "\r": " ",
})  # fmt: skip


def _markdown(text: str) -> str:
    return text.translate(_MARKDOWN)


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def accuracy_text(group: Mapping[str, Any]) -> str:
    if group["accuracy"] is None:
        return "–"
    spread = "" if group["accuracy_std"] is None else f" ± {100 * group['accuracy_std']:.2f}"
    return f"{100 * group['accuracy']:.2f}{spread}"


def _size(value: float | None) -> str:
    return "–" if value is None else show_bytes(round(value))


def _tera(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e12:.3g}"
