"""One writer of tables: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.files import write_atomic

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "✓": r"$\checkmark$",
    "✗": r"$\neq$", "–": "--", "°": r"$^\circ$", ">": r"$>$", "<": r"$<$", "∞": r"$\infty$", "·": r"$\cdot$",
    "≥": r"$\geq$", "—": "---", "ö": r'\"o', "\n": " ", "\r": " ",
})  # fmt: skip
_CELL = str.maketrans({"|": "\\|", "\n": " ", "\r": " "})  # what would end a cell or a row
_MARKUP = {ord(character): f"\\{character}" for character in "\\`*_{}[]<>#~$"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Table:
    """As it is read: text, numbers already rounded."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str = "c"  # of all columns but the first: c or r, as in LaTeX
    foreign: bool = False  # holds text that we did not write ourselves, such as names from a run folder


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """The table alone, without its title."""
    rule = "---:" if table.align == "r" else "---"
    rules = ("---", *(rule for _ in table.header[1:]))
    head, *rows = (tuple(markdown_text(cell, table.foreign) for cell in row) for row in (table.header, *table.rows))
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rules, *rows))


def markdown_text(text: str, foreign: bool) -> str:
    """Foreign text can neither leave its cell nor be read as markup."""
    return text.translate(_MARKUP | _CELL if foreign else _CELL)


def markdown_page(title: str, tables: Sequence[Table], notes: Sequence[str], pictures: Sequence[str] = ()) -> str:
    parts = [f"# {title}"]
    parts += [f"![{picture}]({picture})" for picture in pictures]
    parts += [f"## {table.title}\n\n{markdown(table)}" for table in tables]
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def latex(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """Floats to \\input; for booktabs and amssymb."""
    lines = ["% \\usepackage{booktabs,amssymb}", *(f"% {note}" for note in notes)]
    for table in tables:
        columns = "l" + table.align * (len(table.header) - 1)
        lines += ["\\begin{table}", "\\centering", f"\\caption{{{escape(table.title)}}}"]
        lines += [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", _line(table.header), "\\midrule"]
        lines += map(_line, table.rows)
        lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    return text.translate(_LATEX)


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape, cells)) + " \\\\"


# --- CSV -------------------------------------------------------------------------------------------------------------


def comma_separated(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Exact values; None is an empty field."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([_field(value) for value in row])
    return file.getvalue()


def comma_separated_records(records: Sequence[Mapping[str, Any]]) -> str:
    """One line per record; a column for every key that any of them has."""
    header = list(dict.fromkeys(key for record in records for key in record))
    return comma_separated(header, ([record.get(key) for key in header] for record in records))


def _field(value: Any) -> Any:
    """A name that a spreadsheet would run as a formula is marked as text."""
    if isinstance(value, str) and len(value) > 1 and value.startswith(_FORMULA):
        return f"'{value}"
    return value


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
        "table.md": markdown_page(title, tables, notes, shown),
        "table.tex": latex(tables, notes),
        "table.csv": comma_separated_records(records),
    }
    for name, text in texts.items():
        write_atomic(out / name, text.encode())
    return [*(out / name for name in texts), *pictures]
