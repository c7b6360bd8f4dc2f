"""All benchmarks: prints their tables and writes benchmarks/results/latest.json. `make bench`; under 15 minutes.

    .venv/bin/python -m benchmarks.run_all                          everything
    .venv/bin/python -m benchmarks.run_all --quick --out /tmp/x.json   shows that it works
    .venv/bin/python -m benchmarks.run_all --write-docs             no measuring: the JSON into docs/performance.md

Run it on a quiet machine. Every measurement has processes of its own where threads or memory are in question.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common, fleet, profile_round, rounds, tables, training

LATEST = common.ROOT / "benchmarks" / "results" / "latest.json"
PAGE = common.ROOT / "docs" / "performance.md"


def planning(quick: bool) -> dict[str, Any]:
    few = ["--trials", "1", "--only", "resnet20"] if quick else []
    found: dict[str, Any] = common.child("benchmarks.planning", *few, threads=1)
    return found


def profiled(quick: bool) -> dict[str, Any]:
    if quick:
        return profile_round.measure(quick, common.QUICK.cases)
    return profile_round.measure(quick)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "training": training.measure,
    "rounds": rounds.measure,
    "fleet": fleet.measure,
    "planning": planning,
    "profile": profiled,
}


def measure(quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {**common.provenance(), "quick": quick, "part_seconds": {}}
    began = time.monotonic()
    for name, part in PARTS.items():
        started = time.monotonic()
        results[name] = part(quick)
        results["part_seconds"][name] = round(time.monotonic() - started, 1)
        print(f"\n{getattr(tables, name)(results[name])}\n({results['part_seconds'][name]:.0f} s)", flush=True)
    results["seconds"] = round(time.monotonic() - began, 1)
    results["goals"] = [goal.to_json() for goal in tables.goals(results)]
    return results


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--write-docs", action="store_true", help="only fill docs/performance.md from the JSON")
    args = parser.parse_args()
    if args.write_docs:
        tables.write_docs(PAGE, json.loads(args.out.read_text(encoding="utf-8")))
        print(f"{PAGE} has the numbers of {args.out}")
        return 0
    results = measure(args.quick)
    print(f"\n{tables.goal_table(results)}\n\n{tables.source(results)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
