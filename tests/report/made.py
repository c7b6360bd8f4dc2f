"""Run folders made by hand: the files a run writes, with numbers that can be checked in the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_run(
    path: Path,
    *,
    method: str = "small",
    seed: int = 0,
    rounds: int = 4,
    done: int | None = None,
    accuracy: Any = None,
    constraints: tuple[float, ...] = (0.5,),
    plan: dict[str, Any] | None = None,
    request: dict[str, Any] | None = None,
    dropped: dict[int, list[dict[str, Any]]] | None = None,
    finished: bool | None = None,
    settings_method: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Round r: accuracy (r + 1) / 10 + seed / 100 unless given, 1000 bytes up, 10 FLOPs, 2 seconds."""
    done = rounds if done is None else done
    path.mkdir(parents=True)
    described: dict[str, Any] = {"name": method, "plan": f"hash-{seed}"} if plan else {"name": method}
    if not plan:
        described["constraints"] = list(constraints)
    described = settings_method or described
    config = {
        "settings": {
            "model": {"class": "ResNet", "structure": "none of ours"}, "data": {"name": "own", "classes": 3},
            "method": described, "partition": "iid", "training": {"batch_size": 32}, "rounds": rounds, "devices": 6,
            "per_round": 2, "seed": seed, "bn": "re-estimated", **settings,
        },
        "request": request, "versions": {"strata": "0.1.0", "torch": "2.13.0"}, "commit": None,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "plan.json").write_text(json.dumps(plan or described))
    for round in range(done):
        value = (round + 1) / 10 + seed / 100 if accuracy is None else accuracy(round)
        append(path, round, value, step=round // 2 if plan else 0, dropped=(dropped or {}).get(round, []))
    if finished if finished is not None else done == rounds:
        finish(path, method, seed, rounds)
    return path


def append(path: Path, round: int, accuracy: Any, step: int = 0, dropped: list[dict[str, Any]] | None = None) -> None:
    record = {
        "round": round, "step": step, "lr": 0.1, "train_loss": 2.0 - round / 10, "accuracy": accuracy,
        "upload_bytes": 1000, "download_bytes": 2000, "train_flops": 10, "peak_bytes": 3 << 20, "devices": [1, 4],
        "dropped": dropped or [], "seconds": 2.0,
    }  # fmt: skip
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def finish(path: Path, method: str, seed: int, rounds: int) -> None:
    end = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] if rounds else None
    summary = {"method": method, "seed": seed, "accuracy": end, "per_class_accuracy": [0.5 + seed / 10, None, 1.0]}
    (path / "summary.json").write_text(json.dumps(summary))


PLAN: dict[str, Any] = {
    "model": "own", "classes": 3, "input": [3, 8, 8], "batch": 32, "accounting": "paper", "schedule": "equal",
    "budget_bytes": 4 << 20, "full_bytes": 16 << 20, "feasible": True,
    "steps": [
        {"step": n, "k_frozen": max(0, n - 1), "k_trained": n, "scale": 0.5 if n < 2 else 1.0,
         "memory_bytes": (n + 1) << 20, "weights_bytes": 1 << 19, "gradients_bytes": 1 << 19,
         "activations_bytes": n << 20, "trained_parameters": 100 * (n + 1), "upload_bytes": 400 * (n + 1),
         "train_flops_per_sample": 5, "until_round": 2 * (n + 1)}
        for n in range(3)
    ],
}  # fmt: skip
