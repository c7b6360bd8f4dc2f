"""The native library (native/strata_step.h) from Python: for --verify, tests, and whoever wants to look at a step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from strata.core.errors import BadInput

ABI = 1
TRAINED, FROZEN, BUFFERS = range(3)
ARENA, WEIGHTS, GRADIENTS, MOMENTUM, BATCH, TOTAL, SCRATCH = range(7)
BAD_INPUT, STOPPED = 2, 3
KINDS = {np.dtype(np.uint8): 0, np.dtype(np.float32): 1, np.dtype(np.int64): 2}
LIBRARY, PROGRAM = "libstrata_step.so", "pocket"
_PROGRESS = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64, c_int64, c_double)
_FLOATS, _LONGS = POINTER(c_float), POINTER(c_int64)


class _Samples(Structure):
    _fields_ = (
        ("count", c_int64), ("inputs", c_void_p), ("kind", c_int32), ("channels", c_int32), ("labels", _LONGS)
    )  # fmt: skip


class _Training(Structure):
    _fields_ = (
        ("epochs", c_int32), ("batch", c_int32), ("micro_batch", c_int32), ("lr", c_float), ("momentum", c_float),
        ("weight_decay", c_float), ("proximal", c_float), ("clip", c_float), ("order", _LONGS),
        ("order_seed", c_uint64), ("augmentation_seed", c_uint64), ("dropout_seed", c_uint64),
        ("augmentation", c_char_p), ("mean", _FLOATS), ("std", _FLOATS), ("progress", _PROGRESS), ("context", c_void_p),
    )  # fmt: skip


class _Trained(Structure):
    _fields_ = (("loss", c_double), ("batches", c_int64), ("bytes", c_int64))


class _Scores(Structure):
    _fields_ = (("loss_sum", c_double), ("correct", c_int64), ("samples", c_int64))


class NativeFailed(RuntimeError):
    """The runtime could not do it."""


def native_folder() -> Path | None:
    """Where libstrata_step and pocket were built: $STRATA_NATIVE, or `make native`'s folder beside the package."""
    told = os.environ.get("STRATA_NATIVE")
    folder = Path(told) if told else Path(__file__).resolve().parents[2] / "native" / "build"
    return folder if (folder / LIBRARY).is_file() else None


@cache
def _library(path: Path) -> Any:
    found = ctypes.CDLL(str(path))
    found.strata_step_error.restype = found.strata_step_manifest.restype = c_char_p
    found.strata_step_open.restype = found.strata_step_open_memory.restype = c_void_p
    found.strata_step_open_memory.argtypes = [c_char_p, ctypes.c_size_t, c_char_p, ctypes.c_size_t]
    found.strata_step_size.restype = found.strata_step_bytes.restype = c_int64
    if found.strata_step_abi() != ABI:
        raise BadInput(f"{path} is of another version of Strata: build it again with make native")
    return found


def library() -> Any:
    folder = native_folder()
    if folder is None:
        raise BadInput("the native library is not built: make native, or STRATA_NATIVE=FOLDER where it is")
    return _library(folder / LIBRARY)


@dataclass(frozen=True)
class NativeTraining:
    """What of a device's training the library is told; see strata_step.h."""

    lr: float
    epochs: int = 1
    batch: int = 0
    micro_batch: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-5
    proximal: float = 0.0
    clip: float = 0.0
    order: np.ndarray | None = None
    seeds: tuple[int, int, int] = (0, 0, 0)  # order, augmentation, dropout
    augmentation: str = "none"
    mean: Sequence[float] = ()
    std: Sequence[float] = ()


class NativeStep:
    """An open step. A context manager; what it holds is the library's memory."""

    def __init__(self, handle: int | None) -> None:
        self._library = library()
        if not handle:
            raise BadInput(self._error())
        self._handle = c_void_p(handle)

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(library().strata_step_open(str(folder).encode()))

    @classmethod
    def of(cls, manifest: bytes, program: bytes) -> Self:
        made = cls(library().strata_step_open_memory(manifest, len(manifest), program, len(program)))
        made._kept = program  # it is not copied
        return made

    _kept: bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        self._library.strata_step_close(self._handle)
        self._handle = c_void_p(None)

    def _error(self) -> str:
        return self._library.strata_step_error().decode("utf-8", "replace")

    def _check(self, code: int) -> None:
        if code == BAD_INPUT:
            raise BadInput(self._error())
        if code not in (0, STOPPED):
            raise NativeFailed(self._error())

    def read(self, which: int) -> np.ndarray:
        made = np.empty(self._library.strata_step_size(self._handle, which), dtype=np.float32)
        self._check(self._library.strata_step_read(self._handle, which, _at(made), c_int64(len(made))))
        return made

    def write(self, which: int, values: np.ndarray) -> None:
        row = np.ascontiguousarray(values, dtype=np.float32)
        self._check(self._library.strata_step_write(self._handle, which, _at(row), c_int64(len(row))))

    def bytes(self, which: int) -> int:
        return int(self._library.strata_step_bytes(self._handle, which))

    def train(
        self,
        inputs: np.ndarray,
        labels: np.ndarray,
        training: NativeTraining,
        progress: Callable[[int, int, float], bool] | None = None,
    ) -> float:
        """The mean loss. `progress` gets the batch, how many there are, and its loss; True ends training."""
        keeper: list[Any] = []
        samples = _samples(inputs, labels, keeper)
        order = None if training.order is None else np.ascontiguousarray(training.order, dtype=np.int64)
        call = _PROGRESS()  # none
        if progress is not None:
            call = _PROGRESS(lambda _, *where: int(bool(progress(*where))))
        asked = _Training(
            training.epochs, training.batch, training.micro_batch, training.lr, training.momentum,
            training.weight_decay, training.proximal, training.clip,
            None if order is None else order.ctypes.data_as(_LONGS), *training.seeds,
            training.augmentation.encode(), _row(training.mean, keeper), _row(training.std, keeper),
            call, None,
        )  # fmt: skip
        found = _Trained()
        self._check(self._library.strata_step_train(self._handle, byref(samples), byref(asked), byref(found)))
        return found.loss

    def evaluate(
        self,
        inputs: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        own_statistics: bool = False,
        classes: int = 0,
    ) -> tuple[float, float, np.ndarray | None]:
        """Mean loss, accuracy, and (with `classes`) the scores."""
        keeper: list[Any] = []
        samples, found = _samples(inputs, labels, keeper), _Scores()
        scores = np.empty((len(labels), classes), dtype=np.float32) if classes else None
        self._check(
            self._library.strata_step_evaluate(
                self._handle, byref(samples), c_int32(0), c_int(own_statistics), _row(mean, keeper), _row(std, keeper),
                byref(found), None if scores is None else _at(scores),
            )
        )  # fmt: skip
        return found.loss_sum / found.samples, found.correct / found.samples, scores

    def statistics(
        self, inputs: np.ndarray, labels: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()
    ) -> np.ndarray:
        """Of the batch norms, on these samples as one batch."""
        keeper: list[Any] = []
        samples = _samples(inputs, labels, keeper)
        made = np.empty(self._library.strata_step_size(self._handle, BUFFERS), dtype=np.float32)
        rows = _row(mean, keeper), _row(std, keeper)
        code = self._library.strata_step_statistics(self._handle, byref(samples), *rows, _at(made), c_int64(len(made)))
        self._check(code)
        return made


def _at(values: np.ndarray) -> Any:
    return values.ctypes.data_as(_FLOATS)


def _row(values: Sequence[float], keeper: list[Any]) -> Any:
    if not values:
        return None
    keeper.append((c_float * len(values))(*values))
    return keeper[-1]


def _samples(inputs: np.ndarray, labels: np.ndarray, keeper: list[Any]) -> _Samples:
    if inputs.dtype not in KINDS:
        raise BadInput(f"samples are uint8, float32 or int64, not {inputs.dtype}")
    own, targets = np.ascontiguousarray(inputs), np.ascontiguousarray(labels, dtype=np.int64)
    keeper += [own, targets]
    channels = own.shape[1] if own.dtype == np.uint8 and own.ndim == 4 else 0
    return _Samples(
        len(targets), own.ctypes.data_as(c_void_p), KINDS[own.dtype], channels, targets.ctypes.data_as(_LONGS)
    )
