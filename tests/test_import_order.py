"""Rooms are in the order that data passes them, and imports point only upwards. Everything counts: imports inside
functions and those for type checkers only too."""

from __future__ import annotations

import ast
from pathlib import Path

import strata

ROOMS = (
    "core", "models", "ops", "graph", "execution", "planning", "methods", "data", "training", "engines", "federation",
    "runs", "export", "results", "report", "experiments", "fleet", "cli",
)  # fmt: skip
HERE = Path(strata.__file__).parent


def room_of(module: str) -> str | None:
    """'graph' of 'strata.graph.cut'; None for strata itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "strata" and len(parts) > 1 else None


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """Every module of Strata that is imported anywhere in this file, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "strata":
            found += [(node.lineno, f"strata.{alias.name}") for alias in node.names if alias.name in ROOMS]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.append((node.lineno, node.module))
    return [(line, module) for line, module in found if room_of(module) is not None]


def violations() -> list[str]:
    wrong = []
    for path in sorted(HERE.rglob("*.py")):
        inside = path.relative_to(HERE)
        if len(inside.parts) == 1:
            continue  # strata itself names every room
        room = inside.parts[0]
        for line, module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            other = room_of(module)
            if other not in ROOMS or ROOMS.index(other) > ROOMS.index(room):
                wrong.append(f"{inside}:{line} imports {module}")
    return wrong


def test_every_folder_is_a_room() -> None:
    assert {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)


def test_imports_point_upwards() -> None:
    assert violations() == []
