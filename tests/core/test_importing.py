"""Where modules are looked for: the current folder last, and only for names that the user gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.core.importing import child_command, child_path, find, leave_current_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a file in it that is called like a package, and one that is not."""
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('the wrong safetensors')")
    (tmp_path / "strata_test_mine.py").write_text("thing = 'mine'")
    (tmp_path / "strata_test_ends.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    for name in ("strata_test_mine", "strata_test_ends"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def asked(name: str) -> object:
    return find(name, "model", "module:thing", "to train")


def test_a_name_is_found_in_the_current_folder_which_comes_last(folder: Path) -> None:
    before = list(sys.path)
    assert asked("strata_test_mine:thing") == "mine"
    assert sys.path == [*before, str(folder)]
    assert child_path().split(os.pathsep)[-1] == str(folder)


def test_a_module_that_ends_the_process_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match="cannot import 'strata_test_ends' .*SystemExit: 0"):
        asked("strata_test_ends:thing")


def test_the_folder_of_an_interactive_session_is_last_for_its_children(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/somewhere", "/elsewhere", "/somewhere"])
    assert child_path().split(os.pathsep) == ["/somewhere", "/elsewhere", str(folder)]


def test_python_m_leaves_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), "/somewhere"])
    leave_current_folder()
    assert sys.path == ["/somewhere"]
    monkeypatch.setattr(sys, "path", [str(ROOT), "/somewhere"])
    monkeypatch.chdir(ROOT)
    leave_current_folder()
    assert sys.path == [str(ROOT), "/somewhere"]  # Strata's repository


def test_a_child_imports_the_installed_package(folder: Path) -> None:
    """The point is a process: what Python itself puts first."""
    command = child_command("json.tool", "--help")
    assert command[:2] == [sys.executable, "-P"]
    code = "import safetensors, sys; print(safetensors.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{child_path()}{os.pathsep}{folder}"}
    found = subprocess.run([*command[:2], "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not found.stdout.startswith(str(folder))
