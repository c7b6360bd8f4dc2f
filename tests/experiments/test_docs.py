"""docs/reproducing.md works when pasted; what trains for long, or needs data, must at least name real runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from strata.cli import build_parser, main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "reproducing.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[2:]))
def test_commands(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = command
    assert program == "strata"
    build_parser().parse_args(arguments)
    if "table-steps" in arguments:  # trained by nobody, but it exports four networks: tests/planning has the numbers
        return
    trains = not {"--dry-run", "--render", "list"} & set(arguments)
    assert main([*arguments, "--dry-run", "--no-calibration"] if trains else arguments) == 0


def test_it_says_what_there_is() -> None:
    assert len(COMMANDS) == 7
