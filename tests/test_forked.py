"""Tests in forked processes (tests/forked.py): nothing is lost, whatever a test does to its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = {
    "test_good.py": "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_it(n): print('said')\n",
    "test_bad.py": "def test_first(): pass\ndef test_fails():\n    print('a word of its own')\n    assert 1 == 2\n",
    "test_dies.py": "import os\ndef test_dies(): os._exit(3)\ndef test_after(): pass\n",
    "conftest.py": "pytest_plugins = ['tests.forked']\n",
}


def test_failures_and_deaths_are_reported(tmp_path: Path) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--processes", "2", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"3 failed, 21 passed", done.stdout), done.stdout
    assert "a word of its own" in done.stdout and "said" not in done.stdout
    assert "test_dies.py::test_dies" in done.stdout and "its process died" in done.stdout
    assert "test_dies.py::test_after" in done.stdout and "not run" in done.stdout
