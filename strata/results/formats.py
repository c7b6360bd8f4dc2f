"""A table as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.files import write_atomic

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "✓": r"$\checkmark$",
    "✗": r"$\neq$", "–": "--", "°": r"$^\circ$", ">": r"$>$", "<": r"$<$", "∞": r"$\infty$", "·": r"$\cdot$",
    "≥": r"$\geq$", "—": "---", "ö": r'\"o',
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(title: str, tables: Sequence[Table], notes: Sequence[str], pictures: Sequence[str] = ()) -> str:
    parts = [f"# {title}"]
    parts += [f"![{picture}]({picture})" for picture in pictures]
    for table in tables:
        lines = [f"## {table.title}", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (table.header, ("---",) * len(table.header), *table.rows)]
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def latex(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Floats to \\input; for booktabs and amssymb."""
    parts = ["% \\usepackage{booktabs,amssymb}", *(f"% {note}" for note in notes)]
    for table in tables:
        parts += [
            "\\begin{table}", "\\centering", f"\\caption{{{escape(table.title)}}}",
            f"\\begin{{tabular}}{{l{'c' * (len(table.header) - 1)}}}", "\\toprule", _line(table.header), "\\midrule",
            *map(_line, table.rows), "\\bottomrule", "\\end{tabular}", "\\end{table}",
        ]  # fmt: skip
    return "\n".join(parts) + "\n"


def escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape, cells)) + " \\\\"


def comma_separated(records: Sequence[Mapping[str, Any]]) -> str:
    """One line per record; None is an empty field."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def write(
    out: Path,
    title: str,
    tables: Sequence[Table],
    records: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    pictures: Sequence[Path] = (),
) -> list[Path]:
    """table.md, table.tex and table.csv in `out`; returns them, and the pictures."""
    shown = [picture.name for picture in pictures if picture.suffix == ".png"]
    texts = {
        "table.md": markdown(title, tables, notes, shown),
        "table.tex": latex(tables, notes),
        "table.csv": comma_separated(records),
    }
    for name, text in texts.items():
        write_atomic(out / name, text.encode())
    return [*(out / name for name in texts), *pictures]
