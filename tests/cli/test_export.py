"""`strata export` as a command: what it refuses, before any work. What it writes is tested in tests/export."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli import main
from strata.export import lowering


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--model resnet20", "give the folder to write: --out DIR"),
        ("--run somewhere --batch 4 --out o", "a run has its settings: with --run give none of them"),
        ("--step last --out o", "--step is a whole number from 0 or all, not 'last'"),
        ("--level=-1 --out o", "--level is a whole number from 0, not '-1'"),
        ("--verify --out o", "the native library is not built: make native, or STRATA_NATIVE=FOLDER where it is"),
    ],
)
def test_refusals(
    asked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATA_NATIVE", str(tmp_path))
    monkeypatch.setattr(lowering, "require_executorch", lambda: None)
    monkeypatch.setattr("strata.export.folder.export_folder", None)  # nothing is exported
    assert main(["export", *asked.split()]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
