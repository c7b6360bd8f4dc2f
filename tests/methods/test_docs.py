"""The method of one's own in docs/methods.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documented_method_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = next(block for block in blocks if "class RandomDepth" in block)
    assert len(script.splitlines()) <= 40
    (tmp_path / "own.py").write_text(script)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1
    assert (tmp_path / "runs" / "depth" / "model.safetensors").exists()
