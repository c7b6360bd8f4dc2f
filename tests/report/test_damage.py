"""Any value of any file of a run may be anything: there is a report, or a sentence, but no traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.errors import BadInput
from strata.report import tables
from strata.report.contents import contents
from strata.report.page import embedded
from strata.report.reading import find_runs
from strata.report.rebuilding import Workshop
from tests.report.made import PLAN, make_run

JUNK: tuple[Any, ...] = (None, [], "x", -1, 10**30, float("inf"), [None, 1], {"a": {"b": 1}})
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
    workshop = Workshop()
    for path in places(whole):
        for junk in JUNK:
            (run / file).write_text(json.dumps(changed(whole, path, junk)) + "\n" + rest)
            try:
                made = contents(find_runs([tmp_path]), workshop)
            except BadInput:
                continue
            except Exception as error:
                raise AssertionError(f"{file}: {path} = {junk!r}") from error
            embedded(made)
            tables.files(made)
