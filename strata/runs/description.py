"""A run's settings as JSON: what config.json holds, and what must be the same when a run is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strata import __version__
from strata.data.objectives import Classification
from strata.training.settings import cross_entropy

if TYPE_CHECKING:
    from strata.data import FederatedData, Partition
    from strata.methods import Method
    from strata.training import LocalTraining


def versions() -> dict[str, str]:
    return {
        "strata": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
    }  # fmt: skip


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
        elif field.name not in ("graph", "progress"):
            described[field.name] = _plain(value)
    return described


def describe_training(training: LocalTraining) -> dict[str, Any]:
    described = {field.name: _plain(getattr(training, field.name)) for field in dataclasses.fields(training)}
    if training.activation_checkpointing is None:
        del described["activation_checkpointing"]  # runs without it are described as before there was such a thing
    del described["objective"]  # the data say what they are
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
