"""A run folder: config.json, plan.json, metrics.jsonl, run.log, checkpoint/, and at the end model and summary.

metrics.jsonl and the checkpoint agree after every resume: lines of rounds after the checkpoint are removed, because
these rounds are run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strata import __version__
from strata.core.errors import BadInput
from strata.core.files import (
    Lock,
    is_leftover,
    open_to_append,
    own_folder,
    read_object,
    remove_leftovers,
    said_plainly,
    write_atomic,
    write_json,
)
from strata.core.processor import processor_name
from strata.core.settings import RUN, check_digest, differences, digest_of, settings_of
from strata.data.objectives import Classification
from strata.execution.execution import Execution
from strata.federation.kept_prefixes import DISK
from strata.federation.membership import MEMBERS
from strata.runs import metrics
from strata.runs.allowance import OVER
from strata.runs.checkpoints import Checkpoints
from strata.runs.metrics import EPSILON, FURTHER, METRIC_KEYS, VALIDATION
from strata.training.settings import cross_entropy

if TYPE_CHECKING:
    from strata.data import FederatedData, Partition
    from strata.methods import Method
    from strata.training import LocalTraining


class RunFolder:
    """Open for one run at a time. `say` shows a line to the user; it also goes to run.log."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool, say: Callable[[str], None]) -> None:
        """A new folder, or with `resume` one with the same settings. Nothing is written before all checks are done."""
        self.path = path
        self.settings: Mapping[str, Any] = config.get("settings", {})
        self._say = say
        with said_plainly(path):
            if not resume:
                refuse_used(path)
            elif not (path / "config.json").exists():
                raise BadInput(f"there is no run to resume in {path}")
            if path.exists() and not path.is_dir():
                raise BadInput(f"{path} is not a folder: choose another place for the run")
            if not resume and path.is_dir() and not all(_of_killed(child.name) for child in path.iterdir()):
                raise BadInput(f"{path} is not empty and holds no run: choose a new or empty folder")
        own_folder(path, linked=True)
        self._lock = Lock(path)
        try:
            remove_leftovers(path)
            if resume:
                self._check_same(config)
            else:
                refuse_used(path)  # another run may have begun between the check and the lock
                config = {**config, RUN: digest_of(config)}
                write_json(path / "config.json", config)
            self.checkpoints = _checkpoints(path, read_object(path / "config.json").get(RUN))
            with said_plainly(path):
                self._log = open_to_append(path / "run.log")
                self._metrics = open_to_append(path / metrics.NAME)
        except BaseException:
            self._lock.release()
            raise

    def _check_same(self, config: Mapping[str, Any]) -> None:
        saved = read_object(self.path / "config.json")
        check_digest(saved, self.path / "config.json")
        for name in ("settings", "versions", "machine"):
            if not isinstance(saved.get(name, {}), dict):
                raise BadInput(f"{self.path / 'config.json'} is not as Strata writes it: {name} is no JSON object")
        found = differences(saved.get("settings", {}), config.get("settings", {}))
        if found:
            raise BadInput(
                f"{self.path} was started with other settings: {'; '.join(found)}. "
                "Resume with the same ones, or choose another folder"
            )
        for name, before in _bits_depend_on(saved).items():
            now = _bits_depend_on(config).get(name)
            if now != before:
                self._say(f"this run was started with {name} {before}, now it is {now}: the bits may differ")

    def say(self, text: str) -> None:
        self._say(text)
        self.log(text)

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk must not hide the reason for stopping
            self._log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n".encode(errors="replace"))
            self._log.flush()

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def write_or_compare(self, name: str, value: Mapping[str, Any]) -> None:
        """A file that follows from the settings: another content than at the run's beginning is refused. What a later
        version has more to say is no difference."""
        path = self.path / name
        if not path.exists():
            self.write(name, value)
            return
        saved = read_object(path)
        same_keys = {key: one for key, one in json.loads(json.dumps(value)).items() if key in saved}
        found = differences(saved, same_keys)
        if found:
            raise BadInput(
                f"{path} was changed after the run began ({found[0]:.200}): put back what it was, or remove the file, "
                "and it is written anew"
            )

    def append(self, record: Mapping[str, Any]) -> None:
        in_some_runs = (EPSILON, FURTHER, VALIDATION, OVER, DISK, MEMBERS)
        assert tuple(key for key in record if key not in in_some_runs) == METRIC_KEYS
        with said_plainly(self.path / metrics.NAME):
            self._metrics.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._metrics.flush()

    def sync(self) -> None:
        """Before a checkpoint: the lines of its rounds must be on disk first."""
        with said_plainly(self.path / metrics.NAME):
            os.fsync(self._metrics.fileno())

    def truncate_metrics(self, rounds: int) -> None:
        """Keeps every readable line of rounds below `rounds`, also after a gap or a damaged line: what was lost once is
        no reason to lose more. Of a damaged file a copy stays beside it."""
        path = self.path / metrics.NAME
        content = path.read_bytes()
        lines, damaged = metrics.readable(content)
        kept = [line.content for line in lines if line.round < rounds]
        if damaged:
            self.say(
                f"{_lines(damaged)} of {path.name} cannot be read: the file as it was is kept as "
                f"{self._keep_damaged(content)}"
            )
        if len(kept) < rounds:
            self.say(f"{path.name} holds only {len(kept)} of {rounds} rounds: the lines of the others are lost")
        if b"".join(kept) != content:
            write_atomic(path, b"".join(kept))
            self._metrics.close()
            self._metrics = open_to_append(path)

    def _keep_damaged(self, content: bytes) -> str:
        """Named by what it holds: a resume that is cut off here and made again finds its own."""
        path = self.path / f"metrics.damaged-{hashlib.sha256(content).hexdigest()[:8]}.jsonl"
        write_atomic(path, content)
        return path.name

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._metrics.close()
        with contextlib.suppress(OSError):
            self._log.close()
        self._lock.release()


def _of_killed(name: str) -> bool:
    """Left by a run that was killed as it began."""
    return name == ".lock" or (name.startswith("config.json.") and is_leftover(name))


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


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


def read_summary(path: Path) -> dict[str, Any]:
    """Of a finished run, with all that its closing table shows."""
    file = path / "summary.json"
    summary = read_object(file)
    for key in ("accuracy", "rounds", *metrics.SUMS):
        if type(summary.get(key)) not in (int, float):
            raise BadInput(f"{file} is not as Strata writes it: it holds no number {key}")
    missing = [key for key in ("method", "seed", "loss", "bn") if key not in summary]
    if missing:
        raise BadInput(f"{file} is not as Strata writes it: it holds no {missing[0]}")
    return summary


def _checkpoints(path: Path, run: str | None = None) -> Checkpoints:
    return Checkpoints(path / "checkpoint", run)


def has_checkpoint(path: Path) -> bool:
    """False: a run here, even a resumed one, begins with the model's own weights."""
    return bool(_checkpoints(path).rounds())


# --- what config.json says ---------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {
        "strata": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """The processor decides how sums are rounded."""
    return {"cpu": processor_name(), "cores": os.cpu_count()}


def _bits_depend_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """Beyond the settings. Folders of older versions do not say on which processor they began."""
    cpu = config.get("machine", {}).get("cpu")
    return {**config.get("versions", {}), **({} if cpu is None else {"cpu": cpu})}


def commit() -> str | None:
    """The commit Strata runs from, with + if files were changed since; None outside a git repository."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if head.returncode != 0:
            return None
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def describe_method(method: Method) -> dict[str, Any]:
    described: dict[str, Any] = {"name": method.name}
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name == "plan":
            described["plan"] = value.hash
        elif field.name == "executions":
            if value:  # each as it differs from the run's own
                described[field.name] = [one and one.differences(Execution()) for one in value]
        elif field.metadata.get("since", 1) > 1 and value == field.default:
            continue  # such runs are described as before there was such a thing
        elif field.name not in ("graph", "progress"):
            described[field.name] = _plain(value)
    return described


def describe_training(training: LocalTraining) -> dict[str, Any]:
    """Without what came later and has its default: such runs are described as before there was such a thing."""
    values = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
    later = {name for name, known in settings_of(training).items() if known.since > 1}
    defaults = {field.name: field.default for field in dataclasses.fields(training)}
    kept = {name for name in values if not (name in later and values[name] == defaults[name])}
    kept -= {"objective", "shortened"}  # the data's; what --exact says
    described = {name: _plain(values[name]) for name in values if name in kept}
    if training.loss is None:
        described["loss"] = _plain(cross_entropy) if training.objective == Classification() else None
    return described


def describe_data(data: FederatedData) -> dict[str, Any]:
    """Name, sizes and a digest of all targets and some inputs: other data under the same name is noticed."""
    digest = hashlib.sha256()
    for part in (data.train, data.test):
        digest.update(_bytes(part.targets))
        for tensor in part.tensors:
            digest.update(_bytes(tensor[:: max(1, len(part) // 64)]))
    described = {
        "name": data.name,
        "train": len(data.train),
        "test": len(data.test),
        "classes": data.classes,
        "sha256": digest.hexdigest()[:16],
    }
    if not data.inputs.single or not data.train.has_images:  # images are described as before there was anything else
        described["inputs"] = data.inputs.to_json()
    if data.objective != Classification():
        described["objective"] = repr(data.objective)
    return described


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.contiguous()
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def describe_partition(partition: Partition) -> str:
    """For a partition that is not given by name."""
    arrays = [getattr(partition, name, None) for name in ("indices", "starts")]
    if all(isinstance(array, np.ndarray) for array in arrays):
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays if array is not None))
        return f"own:{digest.hexdigest()[:16]}"
    return f"own:{type(partition).__name__}:{len(partition)}"


def _plain(value: Any) -> Any:
    if callable(value):
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
