"""Metrics that grow are read once, and from the beginning where they are no longer the same."""

from __future__ import annotations

import json
from pathlib import Path

from strata.results.growing import GrowingRecords
from strata.results.reading import _record


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    parsed: list[bytes] = []

    def parse(line: bytes) -> dict[str, int] | None:
        parsed.append(line)
        return _record(line)  # type: ignore[return-value]

    growing = GrowingRecords(parse)

    def after(text: str, mode: str = "a") -> list[int]:
        with path.open(mode) as file:
            file.write(text)
        parsed.clear()
        growing.update(path)
        return [int(record["round"]) for record in growing.records()]

    lines = [json.dumps({"round": round}) + "\n" for round in range(6)]
    assert after("".join(lines[:2]) + '{"rou') == [0, 1] and len(parsed) == 2  # the third is being written
    assert after('nd": 2}\n') == [0, 1, 2] and parsed == [lines[2].encode()]
    assert after("") == [0, 1, 2] and parsed == []
    assert after("nonsense\n" + lines[1] + lines[3]) == [0, 1, 2, 3] and growing.lines == 6
    assert after("".join(lines[:2]), "w") == [0, 1] and growing.lines == 2  # the run went back
    other = json.dumps({"round": 1, "x": 1}) + "\n"
    assert after(lines[0] + other + lines[2], "w") == [0, 1, 2] and growing.records()[1] == {"round": 1, "x": 1}
    path.unlink()
    assert after(lines[0], "w") == [0]
