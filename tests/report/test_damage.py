"""Any value of any file of a run may be anything: there is a report, or a sentence, but no traceback."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.report import tables
from strata.report.page import embedded
from strata.report.page_data import page_data
from strata.report.reconstruction import Reconstruction
from strata.results.reading import find_runs
from tests.report.made import PLAN, make_run

JUNK: tuple[Any, ...] = (
    None, [], "x", -1, 10**30, 10**400, 1e308, float("inf"), [None, 1], {"a": {"b": 1}}, "sl\ud800t",
)  # fmt: skip
REQUEST = {"model": "own:net", "data": "digits", "data_dir": None, "constraints": [0.5], "budgets": [], "input": None}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


@pytest.mark.parametrize("method", ["slt", "fd"])
@pytest.mark.parametrize("file", ["config.json", "plan.json", "summary.json", "metrics.jsonl"])
def test_damaged_files(tmp_path: Path, file: str, method: str) -> None:
    lost = {0: [{"id": 1, "reason": "late"}]}
    plan = {**PLAN, "levels": [{"constraint": 0.5, "budget_bytes": 5, "k_frozen": [0, 0, 1]}]}
    run = make_run(
        tmp_path / "a", method=method, plan=plan if method == "slt" else None, rounds=2, dropped=lost, request=REQUEST
    )
    make_run(tmp_path / "b", method=method, seed=1, rounds=2, request=REQUEST)
    text = (run / file).read_text()
    whole = json.loads(text.splitlines()[0] if file == "metrics.jsonl" else text)
    rest = text.split("\n", 1)[1] if file == "metrics.jsonl" else ""
    rebuilt = Reconstruction()
    for path in places(whole):
        for junk in JUNK:
            (run / file).write_text(json.dumps(changed(whole, path, junk)) + "\n" + rest)
            try:
                made = page_data(find_runs([tmp_path]), rebuilt)
            except BadInput:
                continue
            except Exception as error:
                raise AssertionError(f"{file}: {path} = {junk!r}") from error
            embedded(made)
            tables.files(made)


def test_names_that_are_not_utf_8_and_nests_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (b"a\xff", b"a\xfe"):  # both are called a?
        make_run(tmp_path / os.fsdecode(name), method="sl\ud800t")
    run = make_run(tmp_path / "deep")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "dropped": ' + "[" * 100_000 + "\n")
    (run / "summary.json").write_text('{"a": ' * 600 + "1" + "}" * 600)
    assert main(["report", str(tmp_path), "--out", os.fsdecode(bytes(tmp_path / "out") + b"\xff"), "--no-figures"]) == 0
    said = capsys.readouterr().out
    assert "1 line of metrics.jsonl could not be read" in said and "summary.json" in said and "out?/index.html" in said
    runs = find_runs([tmp_path])
    assert {run.method for run in runs} == {"small", "sl?t"} and len({run.name for run in runs}) == 3
    assert main(["report", str(run), "--out", str(tmp_path / "out"), "--no-figures", "--title", "\udcff"]) == 0
