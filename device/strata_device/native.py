"""libstrata_step.so by ctypes: trains and judges a step program (native/strata_step.h has the words)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from typing import Any

from strata_device.errors import BadInput, CannotRun, OutOfMemory, Refused, one_line
from strata_device.library import ABI

OK, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 3
TRAINED, FROZEN, BUFFERS = 0, 1, 2
UINT8 = 0
NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "no memory",
    "allocate",
    "bad_alloc",
)  # how the library and the runtime say it


class _Samples(Structure):
    _fields_ = [
        ("count", c_int64), ("inputs", c_void_p), ("kind", c_int32), ("channels", c_int32), ("labels", c_void_p),
    ]  # fmt: skip


class _Training(Structure):
    _fields_ = [
        ("epochs", c_int32), ("batch", c_int32), ("micro_batch", c_int32), ("lr", c_float), ("momentum", c_float),
        ("weight_decay", c_float), ("proximal", c_float), ("clip", c_float), ("order", c_void_p),
        ("order_seed", c_uint64), ("augmentation_seed", c_uint64), ("dropout_seed", c_uint64),
        ("augmentation", c_char_p), ("mean", POINTER(c_float)), ("std", POINTER(c_float)), ("progress", c_void_p),
        ("context", c_void_p),
    ]  # fmt: skip


class _Trained(Structure):
    _fields_ = [("loss", c_double), ("batches", c_int64), ("bytes", c_int64)]


class _Scores(Structure):
    _fields_ = [("loss_sum", c_double), ("correct", c_int64), ("samples", c_int64)]


class SampleView:
    """Samples where they are: addresses of uint8 images and of int64 labels, which somebody keeps mapped."""

    def __init__(self, count: int, images: int, labels: int, channels: int) -> None:
        self.made = _Samples(count, images, UINT8, channels, labels)


class Library:
    def __init__(self, path: str) -> None:
        try:
            self._calls: Any = ctypes.CDLL(path)
            self._calls.strata_step_abi.restype = c_int
            abi = self._calls.strata_step_abi()
        except (OSError, AttributeError) as error:
            raise BadInput(f"{path} is not the native library ({one_line(error, 200)}): build it anew") from None
        if abi != ABI:
            raise BadInput(f"{path} speaks version {abi} of its interface and this device {ABI}: install the same ones")
        declare(self._calls)

    def open(self, manifest: bytes, program: int, size: int) -> Step:
        """`program`: the address of its bytes, which stay there until the step is closed."""
        handle = self._calls.strata_step_open_memory(manifest, len(manifest), program, size)
        if not handle:
            words = self.words()
            if any(sign in words.lower() for sign in NO_MEMORY):
                raise OutOfMemory(words)
            raise CannotRun(words)
        return Step(self, handle)

    def words(self) -> str:
        return one_line(self._calls.strata_step_error().decode("utf-8", "replace"))

    def checked(self, code: int) -> None:
        if code == OK:
            return
        words = self.words()
        if any(sign in words.lower() for sign in NO_MEMORY):
            raise OutOfMemory(words)
        if code == BAD_INPUT:
            raise Refused(words)
        raise CannotRun(words) if "operator" in words.lower() else RuntimeError(words)


class Step:
    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._handle = library, c_void_p(handle)
        self._calls = library._calls

    def close(self) -> None:
        self._calls.strata_step_close(self._handle)
        self._handle = c_void_p()

    def size(self, which: int) -> int:
        return int(self._calls.strata_step_size(self._handle, which))

    def write(self, which: int, values: Any) -> None:
        """`values`: a ctypes array of float32."""
        self._library.checked(self._calls.strata_step_write(self._handle, which, values, len(values)))

    def read(self, which: int) -> Any:
        values = (c_float * self.size(which))()
        self._library.checked(self._calls.strata_step_read(self._handle, which, values, len(values)))
        return values

    def lend(self, address: int, count: int) -> None:
        self._library.checked(self._calls.strata_step_lend(self._handle, address, count))

    def train(self, samples: SampleView, training: dict[str, Any]) -> tuple[float, int]:
        """The mean loss, and the bytes that it took as a plan counts them."""
        kept = {name: floats(training[name]) for name in ("mean", "std")}
        made = _Training(
            epochs=training["epochs"],
            batch=training["batch"],
            micro_batch=training["micro_batch"],
            lr=training["lr"],
            momentum=training["momentum"],
            weight_decay=training["weight_decay"],
            proximal=training["proximal"],
            clip=training["clip"],
            order_seed=training["order_seed"],
            augmentation_seed=training["augmentation_seed"],
            dropout_seed=training["dropout_seed"],
            augmentation=training["augmentation"].encode(),
            **kept,
        )
        found = _Trained()
        self._library.checked(
            self._calls.strata_step_train(
                self._handle, ctypes.byref(samples.made), ctypes.byref(made), ctypes.byref(found)
            )
        )
        return found.loss, found.bytes

    def evaluate(
        self, samples: SampleView, own_statistics: bool, mean: Sequence[float], std: Sequence[float], classes: int
    ) -> tuple[float, Any]:
        """The sum of losses, and the scores [count * classes]."""
        found, scores = _Scores(), (c_float * (samples.made.count * classes))()
        self._library.checked(
            self._calls.strata_step_evaluate(
                self._handle, ctypes.byref(samples.made), 0, int(own_statistics), floats(mean), floats(std),
                ctypes.byref(found), scores,
            )
        )  # fmt: skip
        return found.loss_sum, scores

    def statistics(self, samples: SampleView, mean: Sequence[float], std: Sequence[float]) -> Any:
        """Of the batch norms, these samples as one batch: in the order of the buffers."""
        values = (c_float * self.size(BUFFERS))()
        self._library.checked(
            self._calls.strata_step_statistics(
                self._handle, ctypes.byref(samples.made), floats(mean), floats(std), values, len(values)
            )
        )
        return values


class _Buffer(ctypes.Structure):
    """Python's own description of a buffer, of which the first field is where it begins."""

    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("rest", ctypes.c_byte * 256)]


def address_of(view: memoryview) -> int:
    """Where a read-only buffer begins. Whoever uses it keeps the view."""
    if not len(view):
        return 0
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


def floats(values: Sequence[float]) -> Any:
    """NULL for none."""
    return (c_float * len(values))(*values) if values else None


def declare(calls: Any) -> None:
    """Of each function what it takes and gives: ctypes would take addresses for 32 bits wide."""
    step, numbers, samples = c_void_p, POINTER(c_float), POINTER(_Samples)
    for name, gives, takes in (
        ("open_memory", step, (c_char_p, c_size_t, c_void_p, c_size_t)),
        ("error", c_char_p, ()),
        ("size", c_int64, (step, c_int)),
        ("write", c_int, (step, c_int, numbers, c_int64)),
        ("read", c_int, (step, c_int, numbers, c_int64)),
        ("lend", c_int, (step, c_void_p, c_int64)),
        ("train", c_int, (step, samples, POINTER(_Training), POINTER(_Trained))),
        ("evaluate", c_int, (step, samples, c_int32, c_int, numbers, numbers, POINTER(_Scores), numbers)),
        ("statistics", c_int, (step, samples, numbers, numbers, numbers, c_int64)),
        ("close", None, (step,)),
    ):
        function = getattr(calls, f"strata_step_{name}")
        function.restype, function.argtypes = gives, takes
