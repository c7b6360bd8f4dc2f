"""docs/data.md works when pasted: its Python, and its commands (those that fetch must at least parse)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from strata.cli import build_parser, main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) == 3
    for program, *args in commands:
        assert program == "strata"
        build_parser().parse_args(args)
        if "get" not in args:
            assert main(args) == 0
    assert (tmp_path / "holdings.png").stat().st_size > 1000


def test_python(capsys):
    for block in blocks("python"):
        exec(compile(block, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([32, 3, 32, 32]) torch.Size([32])\n"
