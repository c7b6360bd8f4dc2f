"""One writer of tables: what is in a cell stays in it, in Markdown, LaTeX and CSV."""

from __future__ import annotations

from pathlib import Path

from strata.results.tables import Table, comma_separated, comma_separated_records, latex, markdown, write


def test_all_three_by_hand(tmp_path: Path) -> None:
    table = Table("A title", ("method", "accuracy"), (("SLT", "74.0 ± 2.0"), ("small model", "–")))
    records = [{"method": "slt", "accuracy": 74.0}, {"method": "small", "accuracy": None, "note": "x"}]
    files = write(tmp_path, "Page", [table], records, ["A note."], [tmp_path / "f.png", tmp_path / "f.svg"])
    assert [path.name for path in files] == ["table.md", "table.tex", "table.csv", "f.png", "f.svg"]
    assert (tmp_path / "table.md").read_text() == (
        "# Page\n\n![f.png](f.png)\n\n## A title\n\n| method | accuracy |\n| --- | --- |\n| SLT | 74.0 ± 2.0 |\n"
        "| small model | – |\n\n- A note.\n"
    )
    assert (tmp_path / "table.csv").read_text() == "method,accuracy,note\nslt,74.0,\nsmall,,x\n"
    assert (tmp_path / "table.tex").read_text().splitlines() == [
        r"% \usepackage{booktabs,amssymb}", "% A note.", r"\begin{table}", r"\centering", r"\caption{A title}",
        r"\begin{tabular}{lc}", r"\toprule", r"method & accuracy \\", r"\midrule", r"SLT & 74.0 $\pm$ 2.0 \\",
        r"small model & -- \\", r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip


def test_a_bar_or_a_new_line_does_not_end_a_cell() -> None:
    text = markdown(Table("", ("sets", "x"), (("|I| = 5", "a\nb"),)))
    assert text.splitlines()[2] == r"| \|I\| = 5 | a b |"
    assert "a b" in latex([Table("", ("x",), (("a\nb",),))])


def test_foreign_text_is_no_markup_and_ours_is_left_alone() -> None:
    rows = (("<b>*_", "1"),)
    assert markdown(Table("", ("a", "b"), rows, "r", foreign=True)).splitlines()[1:] == [
        "| --- | ---: |", r"| \<b\>\*\_ | 1 |",
    ]  # fmt: skip
    assert markdown(Table("", ("a", "b"), rows)).splitlines()[2] == "| <b>*_ | 1 |"


def test_formulas_are_text_but_a_dash_is_a_dash() -> None:
    assert comma_separated(("x", "y"), [("=1", -1.5), ("-", "-x"), (None, True)]) == "x,y\n'=1,-1.5\n-,'-x\n,True\n"
    assert comma_separated_records([]) == "\n"
