"""What was learned of operators (learned.py), in memory and, for the next start, on disk.

Learning a call takes some milliseconds, and the first one the import of torch's compiler; a plan may need hundreds. On
disk are only torch's own operators, whose behaviour its version fixes: an operator of the user's may be another one
tomorrow. The file is the user's own (core/cache.py), holds JSON, and is named after all that a lesson depends on.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

import strata
from strata.core import cache
from strata.ops.tape import Strides

MOST = 20_000  # lessons in the file; beyond, the oldest go


@dataclass(frozen=True)
class LearnedResult:
    shape: tuple[int, ...]
    strides: Strides
    itemsize: int
    view_of: int | None  # position among the tensor inputs (of a gradient: among the incoming ones); None: new
    differentiable: bool


@dataclass(frozen=True)
class Lesson:
    results: tuple[LearnedResult, ...]
    many: bool  # the operator returns a list
    forward: int  # highest rise in forward
    kept_inputs: tuple[int, ...]
    kept_results: tuple[int, ...]
    kept_bytes: int  # of other tensors, made to be kept
    gradients: tuple[LearnedResult | None, ...]  # per tensor input; a view is one of the incoming gradients
    backward: int  # highest rise in backward, the gradients included


class Lessons:
    """By kind of call: the operator first, then whatever describes its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Lesson] = {}
        self._on_disk: dict[str, Any] | None = None  # read at the first question
        self._new: dict[str, Any] = {}

    def find(self, key: tuple[Any, ...]) -> Lesson | None:
        lesson = self._known.get(key)
        if lesson is None and _lasting(key[0]):
            if self._on_disk is None:
                self._on_disk = _read()
            lesson = _decoded(self._on_disk.get(_text(key)))
            if lesson is not None:
                self._known[key] = lesson
        return lesson

    def add(self, key: tuple[Any, ...], lesson: Lesson) -> None:
        self._known[key] = lesson
        if _lasting(key[0]):
            if not self._new:
                atexit.register(self.save)
            self._new[_text(key)] = astuple(lesson)

    def save(self) -> None:
        """Together with what other processes have saved meanwhile."""
        path = _path()
        if path is None or not self._new:
            return
        lessons = {**_read(), **self._new}
        newest = dict(list(lessons.items())[-MOST:])
        cache.write(path, json.dumps(newest, separators=(",", ":")).encode())
        self._new = {}
        atexit.unregister(self.save)


def _lasting(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _text(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


def _path() -> Path | None:
    folder = cache.private_folder("lessons")
    if folder is None:
        return None
    try:
        code = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("learned", "lessons", "traced")]
    except OSError:
        return None  # installed without sources: nobody could tell one learner from another
    # oneDNN, which keeps what a real run shows, goes by the processor; a home folder may be shared
    depends_on = (torch.__version__, strata.__version__, torch.backends.cpu.get_cpu_capability(), code)
    return folder / f"{hashlib.sha256(repr(depends_on).encode()).hexdigest()[:16]}.json"


def _read() -> dict[str, Any]:
    path = _path()
    content = None if path is None else cache.read(path)
    try:
        found = json.loads(content) if content is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _decoded(fields: Any) -> Lesson | None:
    """What json made of `astuple(lesson)`; None if it is nothing of the kind."""
    try:
        results, many, forward, kept_inputs, kept_results, kept_bytes, gradients, backward = fields
        return Lesson(
            tuple(_result(one) for one in results),
            many,
            forward,
            tuple(kept_inputs),
            tuple(kept_results),
            kept_bytes,
            tuple(None if one is None else _result(one) for one in gradients),
            backward,
        )
    except (TypeError, ValueError):
        return None


def _result(fields: Any) -> LearnedResult:
    shape, strides, itemsize, view_of, differentiable = fields
    return LearnedResult(tuple(shape), None if strides is None else tuple(strides), itemsize, view_of, differentiable)
