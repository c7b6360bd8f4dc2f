"""A run folder: config.json, plan.json, metrics.jsonl, run.log, checkpoint/, and at the end model and summary.

metrics.jsonl and the checkpoint agree after every resume: lines of rounds after the checkpoint are removed, because
these rounds are run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import Lock, read_object, said_plainly, write_json
from strata.runs.checkpoints import Checkpoints

METRIC_KEYS = (
    "round", "step", "lr", "train_loss", "accuracy", "upload_bytes", "download_bytes", "train_flops", "peak_bytes",
    "devices", "dropped", "seconds",
)  # fmt: skip
EPSILON = "epsilon"  # one key more under differential privacy


class RunFolder:
    """Open for one run at a time. `say` shows a line to the user; it also goes to run.log."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool, say: Callable[[str], None]) -> None:
        """A new folder, or with `resume` one with the same settings. Nothing is written before all checks are done."""
        self.path = path
        self._say = say
        with said_plainly(path):
            if not resume:
                refuse_used(path)
            elif not (path / "config.json").exists():
                raise BadInput(f"there is no run to resume in {path}")
            if path.exists() and not path.is_dir():
                raise BadInput(f"{path} is not a folder: choose another place for the run")
            leftovers = {".lock", "config.json.tmp"}  # of a run that was killed as it began
            if not resume and path.is_dir() and any(child.name not in leftovers for child in path.iterdir()):
                raise BadInput(f"{path} is not empty and holds no run: choose a new or empty folder")
            path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(path)
        try:
            if resume:
                self._check_same(config)
            else:
                refuse_used(path)  # another run may have begun between the check and the lock
                write_json(path / "config.json", config)
            self.checkpoints = _checkpoints(path)
            with said_plainly(path):
                self._log = open(path / "run.log", "a", encoding="utf-8")
                self._metrics = open(path / "metrics.jsonl", "ab")
        except BaseException:
            self._lock.release()
            raise

    def _check_same(self, config: Mapping[str, Any]) -> None:
        saved = read_object(self.path / "config.json")
        found = differences(saved.get("settings", {}), config.get("settings", {}))
        if found:
            raise BadInput(
                f"{self.path} was started with other settings: {'; '.join(found)}. "
                "Resume with the same ones, or choose another folder"
            )
        for name, version in saved.get("versions", {}).items():
            now = config.get("versions", {}).get(name)
            if now != version:
                self._say(f"this run was started with {name} {version}, now it is {now}: the bits may differ")

    def say(self, text: str) -> None:
        self._say(text)
        self.log(text)

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk must not hide the reason for stopping
            self._log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
            self._log.flush()

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def append(self, record: Mapping[str, Any]) -> None:
        assert tuple(key for key in record if key != EPSILON) == METRIC_KEYS
        with said_plainly(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._metrics.flush()

    def sync(self) -> None:
        """Before a checkpoint: the lines of its rounds must be on disk first."""
        with said_plainly(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())

    def truncate_metrics(self, rounds: int) -> None:
        """Keeps the lines of rounds below `rounds`, also after a gap: what was lost once is no reason to lose more."""
        path = self.path / "metrics.jsonl"
        end = kept = 0
        last = -1
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                round = json.loads(line)["round"]
                if not line.endswith(b"\n") or not last < round < rounds:
                    break
            except (ValueError, KeyError, TypeError):
                break
            last = round
            end += len(line)
            kept += 1
        if kept < rounds:
            self.say(f"metrics.jsonl holds only {kept} of {rounds} rounds: the lines of the others are lost")
        with said_plainly(path):
            os.truncate(path, end)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._metrics.close()
        with contextlib.suppress(OSError):
            self._log.close()
        self._lock.release()


def refuse_used(path: Path, resume: str | None = None) -> None:
    """`resume`: the option that would go on with it, where that is not `--resume PATH`."""
    with said_plainly(path):
        used = (path / "config.json").exists()
    if used:
        how = resume or f"--resume {path}"
        raise BadInput(f"{path} already holds a run: resume it with {how}, or choose another folder")


def is_finished(path: Path) -> bool:
    """These two are written last."""
    with said_plainly(path):
        return all((path / name).exists() for name in ("model.safetensors", "summary.json"))


def _checkpoints(path: Path) -> Checkpoints:
    return Checkpoints(path / "checkpoint")


def has_checkpoint(path: Path) -> bool:
    """False: a run here, even a resumed one, begins with the model's own weights."""
    return bool(_checkpoints(path).rounds())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run folder; a last line that was cut off is left out."""
    file = path / "metrics.jsonl"
    try:
        lines = file.read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {file}: {error}") from error


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*saved, *now}):
        before, after = saved.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} was {json.dumps(before)} and is now {json.dumps(after)}")
    return found
