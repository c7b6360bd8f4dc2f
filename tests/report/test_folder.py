"""The folder, the page's escaping, tables and figures, and what the command says."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.report import figures, tables, write_report
from strata.report.folder import MARK
from strata.report.page import embedded, page
from strata.report.page_data import page_data
from strata.report.reconstruction import Reconstruction
from strata.results.reading import find_runs
from strata.results.tables import comma_separated
from tests.report.made import PLAN, make_run

EVIL = "</script><script>alert(1)</script><!--&$x_{|`=\"'"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (0, 2):
        make_run(tmp_path / "runs" / f"small-{seed}", seed=seed)
    make_run(tmp_path / "runs" / "slt", method="slt", plan=PLAN, done=3)
    return tmp_path / "runs"


def test_a_report_is_written_again_but_never_over_others(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    monkeypatch.setattr(figures, "files", lambda made: {"figures/steps.png": b"drawn elsewhere"})
    write_report([runs], out)
    first = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"index.html", "tables/summary.csv", "tables/summary.md", "tables/summary.tex", "tables/rounds.csv",
            "figures/steps.png"} <= first  # fmt: skip
    assert set(json.loads((out / MARK).read_text())["files"]) == first - {MARK}
    (out / "mine.txt").write_text("keep me")
    write_report([runs], out, with_figures=False)  # figures of the report before are ours to remove
    second = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert not any(name.startswith("figures/") for name in second) and "mine.txt" in second
    (out / "figures" / "steps.png").write_text("also mine")
    with pytest.raises(BadInput, match="not written by a report"):
        write_report([runs], out)
    assert (out / "figures" / "steps.png").read_text() == "also mine"


def test_foreign_folders_are_refused(tmp_path: Path, runs: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "index.html").write_text("my homepage")
    with pytest.raises(BadInput, match="not empty and holds no report"):
        write_report([runs], foreign)
    with pytest.raises(BadInput, match="is a run"):
        write_report([runs], runs / "slt")
    with pytest.raises(BadInput, match="not a folder"):
        write_report([runs], foreign / "index.html")
    (foreign / MARK).write_text(json.dumps({"files": ["../outside.txt", "tables/../../outside.txt", "mine"]}))
    (tmp_path / "outside.txt").write_text("far away")
    (foreign / "mine").write_text("mine")
    with pytest.raises(BadInput, match="not written by a report"):  # index.html is not in the mark
        write_report([runs], foreign, with_figures=False)
    (foreign / "index.html").unlink()
    write_report([runs], foreign, with_figures=False)  # a forged mark makes us remove nothing else
    assert (tmp_path / "outside.txt").exists() and (foreign / "mine").exists()


def test_text_from_runs_cannot_leave_its_place(tmp_path: Path) -> None:
    make_run(tmp_path / "a", method=EVIL, partition=EVIL, dropped={0: [{"id": 1, "reason": EVIL}]})
    made = page_data(find_runs([tmp_path]), None, EVIL)
    text = page(made, "/* plotly */")
    assert "alert(1)</script>" not in text and text.count("</script>") == 3  # data, plotly, page
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data and json.loads(data[1])["title"] == EVIL
    assert "<" not in embedded(EVIL)
    assert page({**made, "title": "@@css@@"}, "").count("--paper: #f5f6f8") == 1  # data is not read as a template
    files = {name: data.decode() for name, data in tables.files(made).items()}
    assert r"\&\$x\_\{|`=" in files["tables/summary.tex"]
    assert r"\</script\>\<script\>" in files["tables/summary.md"] and r"\|\`=" in files["tables/summary.md"]
    for name, drawn in figures.files(made).items():
        if name.endswith(".svg"):
            assert not any(element.tag.endswith("script") for element in ElementTree.fromstring(drawn).iter())


def test_the_page_loads_nothing_and_holds_plotly_once(runs: Path) -> None:
    text = page(page_data(find_runs([runs]), None))
    assert text.count("* plotly.js v") == 1
    own = text.replace(text[text.index("/**\n* plotly.js") : text.index('<script>"use strict"')], "")
    assert not re.search(r'(src|href)="(?!data:)', own) and "default-src 'none'" in own


def test_tables_agree_with_the_runs(runs: Path) -> None:
    made = page_data(find_runs([runs]), None)
    files = {name: text.decode() for name, text in tables.files(made).items()}
    rows = list(csv.DictReader(io.StringIO(files["tables/summary.csv"])))
    assert [row["method"] for row in rows] == ["slt", "small"]
    assert float(rows[1]["accuracy_mean"]) == pytest.approx(0.41) and rows[0]["accuracy_std"] == ""
    assert (rows[0]["status"], rows[0]["rounds_done"]) == ("unfinished", "3")
    assert "| small | 41.00 ± 1.41 | 4/4 | 2 |" in files["tables/summary.md"]
    assert r"small & 41.00 $\pm$ 1.41 & 4/4 & 2 &" in files["tables/summary.tex"]
    assert len(files["tables/rounds.csv"].splitlines()) == 1 + 4 + 4 + 3
    assert "| 1 | – |" in files["tables/per-class.md"] and "60.0" in files["tables/per-class.md"]


def test_tables_say_which_runs_are_counted(tmp_path: Path) -> None:
    for seed, done in enumerate((4, 2)):
        make_run(tmp_path / str(seed), seed=seed, done=done)
    files = {name: text.decode() for name, text in tables.files(page_data(find_runs([tmp_path]), None)).items()}
    (row,) = csv.DictReader(io.StringIO(files["tables/summary.csv"]))
    wanted = {"rounds_done": "4", "seeds": "1", "runs": "2", "counted": "finished runs", "accuracy_mean": "0.4",
              "accuracy_std": "", "upload_bytes": "4000.0", "status": "unfinished"}  # fmt: skip
    assert wanted.items() <= row.items()
    assert "| small | 40.00 | 4/4 | 1 of 2 |" in files["tables/summary.md"]
    assert "small & 40.00 & 4/4 & 1 of 2 &" in files["tables/summary.tex"]


def test_names_that_a_spreadsheet_would_run_are_text() -> None:
    text = comma_separated(("a",), [("=cmd()",), ("plain",), (-1.5,), (None,)])
    assert text.splitlines() == ["a", "'=cmd()", "plain", "-1.5", '""']


def test_figures_are_drawn_and_are_the_same_for_the_same_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = page_data(find_runs([runs]), Reconstruction())
    first = figures.files(made)
    names = ["accuracy-rounds", "accuracy-upload", "accuracy-flops", "accuracy-seconds", "accuracy-bytes",
             "accuracy-sent", "steps", "memory-1-slt", "memory-2-small", "parameters-1-slt",
             "parameters-2-small", "per-class"]  # fmt: skip
    assert set(first) == {f"figures/{name}.{ending}" for name in names for ending in ("png", "svg")}
    assert first["figures/accuracy-rounds.png"].startswith(b"\x89PNG")
    monkeypatch.setattr(figures, "AXES", {"rounds": figures.AXES["rounds"]})
    again = figures.files({**made, "groups": made["groups"][1:]})
    assert again["figures/per-class.svg"] == first["figures/per-class.svg"]  # no date, no random ids


def test_a_run_without_any_round_still_gives_a_report(tmp_path: Path) -> None:
    make_run(tmp_path / "a", done=0)
    made = write_report([tmp_path / "a"], tmp_path / "out")
    assert made["groups"][0]["accuracy"] is None and made["groups"][0]["parts"]["missing"]


def test_the_command(tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["report", str(runs), "--out", out, "--no-figures", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == f"{out}/index.html" and said["summary"][1]["accuracy_mean"] == pytest.approx(0.41)
    assert main(["report", str(tmp_path / "nothing"), "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("strata report: there is no folder") and "Traceback" not in error
    for command in (["report", "x" * 300, "--out", out], ["report", str(runs), "--out", "x" * 300]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "File name too long" in error and "checkpoint" not in error


def test_without_plotly_one_sentence_says_what_to_install(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for command in (["report", str(runs), "--out", str(tmp_path / "out")], ["watch", str(runs)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "pip install strata-fl[report]" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
