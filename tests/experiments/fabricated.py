"""Run folders made by hand, with numbers that are easy to check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.experiments import Asked, Cell


def fabricate(
    root: Path,
    cell: Cell,
    rounds: int,
    seed: int,
    accuracies: Sequence[float | None],
    *,
    upload: int = 10**9,
    flops: int = 10**15,
    steps: Sequence[int] | None = None,
    peak: int = 10**6,
) -> Path:
    """`accuracies`: one a round, in 0 .. 1; the last is the result. `upload` and `flops`: of every round."""
    assert len(accuracies) == rounds
    folder = root / cell.name / f"rounds-{rounds}" / f"seed-{seed}"
    folder.mkdir(parents=True)
    request = cell.request(seed, Asked()).changed(rounds=rounds).to_json()
    write(folder / "config.json", {"request": request})
    write(folder / "plan.json", {"accounting": "paper"} if cell.method == "slt" else {"name": cell.method})
    write(folder / "summary.json", {"accuracy": accuracies[-1], "bn": "batch", "rounds": rounds, "seed": seed,
                                   "peak_bytes": peak})  # fmt: skip
    records = (
        {"round": n, "step": steps[n] if steps else 0, "accuracy": accuracy, "upload_bytes": upload,
         "train_flops": flops}
        for n, accuracy in enumerate(accuracies)
    )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
