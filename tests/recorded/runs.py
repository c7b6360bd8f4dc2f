"""Ten short runs over methods, engines and options, and what they came to: `python -m tests.recorded.runs`.

Counts (bytes, FLOPs, devices, steps) are the same on every machine. Bits are the same on machines that round alike, so
they are kept with the processor that made them. The first record was made on commit 1d865a1; a restructuring may add to
config.json, but must move none of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("record.json")
COMMON = ["--model", "tests.recorded.network:make", "--rounds", "4", "--devices", "12", "--per-round", "6", "--batch",
          "16", "--seed", "3", "--quiet"]  # fmt: skip
RUNS: dict[str, list[str]] = {
    "slt": ["--method", "slt", "--constraint", "0.5", "--exact"],
    "slt levels": ["--method", "slt", "--constraint", "0.5,0.75", "--partition", "dirichlet:0.3"],
    "slt early": ["--method", "slt", "--constraint", "0.5", "--schedule", "early-stopping", "--patience", "1",
                  "--validation", "0.1"],
    "fedavg": ["--method", "fedavg", "--exact", "--bn", "batch", "--dropout", "0.2"],
    "fedavg lean": ["--method", "fedavg", "--micro-batch", "8", "--activation-checkpointing", "auto"],
    "small": ["--method", "small", "--budget", "600KiB", "--server-optimizer", "momentum", "--weighted"],
    "fd": ["--method", "fd", "--constraint", "0.5", "--aggregation", "median", "--workers", "0"],
    "fedrolex": ["--method", "fedrolex", "--constraint", "0.25", "--proximal", "0.01", "--kernels", "off"],
    "heterofl": ["--method", "heterofl", "--constraint", "0.25,0.5", "--exact", "--stragglers", "0.3:3", "--deadline",
                 "2"],
    "fjord": ["--method", "fjord", "--constraint", "0.25,0.5,1", "--epochs", "2", "--norm-bound", "50"],
}  # fmt: skip
FLOATS = ("train_loss", "accuracy", "epsilon")


def play(name: str, folder: Path) -> dict[str, Any]:
    """The run's counts, and the digests of its bits."""
    from safetensors.torch import save_file

    from strata.cli import main
    from tests.recorded.network import weights

    init = folder / "init.safetensors"
    save_file(weights(), init)
    out = folder / "run"
    arguments = RUNS[name] if "--workers" in RUNS[name] else [*RUNS[name], "--workers", "2"]
    assert main(["run", *COMMON, *arguments, "--init", str(init), "--out", str(out)]) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    counts = [{key: value for key, value in record.items() if key not in FLOATS} for record in records]
    return {
        "counts": _digest(counts),
        "metrics": _digest(records),
        "model": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:16],
    }


def processor() -> str:
    """Its name and what it can do: both decide how sums are rounded."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines[: lines.index("")])
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{found.get('model name', '?')} {_digest(sorted(found.get('flags', '').split()))}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"counts": {}, "bits": {}}
    bits = kept["bits"].setdefault(processor(), {})
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = play(name, Path(folder))
        print(name, found, file=sys.stderr)
        kept["counts"][name] = found["counts"]
        bits[name] = {"metrics": found["metrics"], "model": found["model"]}
    FILE.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
