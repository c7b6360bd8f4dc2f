"""Tiny programs for workers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Label:
    """Stands for a Cut: has a hash, is sent once."""

    hash: str


class Echo:
    """Jobs are tuples (verb, value...)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.held: dict[str, Tensor] = {}

    def ready(self) -> None:
        pass

    def __call__(self, job: Any, state: Mapping[str, Tensor]) -> Any:
        verb, *values = job
        if verb == "add":
            return values[0] + float(state["w"].sum())
        if verb == "held":
            return float(self.held[values[0]].double().sum())
        if verb == "raise":
            raise ValueError(values[0])
        if verb == "threads":
            return torch.get_num_threads()
        if verb == "pid":
            return os.getpid()
        if verb == "label":
            return values[0], id(values[0])
        if verb == "die once":  # SIGKILL in mid-task, the first time only
            mark = values[0]
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return "survived"
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "hang":
            values[0].write_text(str(os.getpid()))
            time.sleep(600)
        raise AssertionError(verb)


class Broken:
    def ready(self) -> None:
        raise RuntimeError("no network here")

    def __call__(self, job: Any, state: Mapping[str, Tensor]) -> Any:
        raise AssertionError


class Asks(Broken):
    def ready(self) -> None:
        input()  # there is nobody to answer


class Calls(Broken):
    def ready(self) -> None:
        subprocess.run(["false"], check=True)
