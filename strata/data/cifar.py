"""CIFAR-10 and CIFAR-100 from the published `cifar-*-python` folders, which hold Python 2 pickles.

A pickle is a program. These files hold dicts, lists, byte strings, small integers and one uint8 array each; the reader
admits the opcodes for just that, and builds the array itself: no function named by the file is ever called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.core.errors import BadInput
from strata.data.files import read_bytes
from strata.data.images import ImageSet
from strata.data.samples import FederatedData

# what Python 2 wrote, in protocol 0 (batches.meta) and protocol 2 (the batches)
_OPCODES = frozenset(
    "PROTO MARK STOP POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 STRING BINSTRING SHORT_BINSTRING "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET GLOBAL REDUCE BUILD".split()
)
_MEMO_OPCODES = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Dtype:
    """Stands in for numpy.dtype: remembers that it was made for uint8, refuses the rest."""

    def __init__(self, code: bytes, *_: object) -> None:
        if code != b"u1":
            raise pickle.UnpicklingError(f"an array of {code!r} instead of uint8")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment mean nothing for uint8


class _Array:
    """Stands in for numpy.ndarray; `value` is a real uint8 array once the state has come."""

    value: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not (isinstance(dtype, _Dtype) and isinstance(raw, bytes) and all(isinstance(side, int) for side in shape)):
            raise pickle.UnpicklingError("an array that is not plain uint8 data")
        self.value = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of an unknown kind")
    return _Array()


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def read_pickle(path: Path) -> dict[bytes, Any]:
    """The dict in a CIFAR file. Anything that such a file does not hold is refused before any of it is run."""
    raw = read_bytes(path)
    try:
        _screen(raw)
        content = _Reader(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # whatever a broken or hostile file provokes
        raise BadInput(
            f"{path} is not a CIFAR file as published ({_reason(error)}); it was not run, fetch the data set again"
        ) from error
    if not isinstance(content, dict):
        raise BadInput(f"{path} is not a CIFAR file as published (no dictionary in it); fetch the data set again")
    found = {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}
    if any(isinstance(value, _Array) and value.value is None for value in content.values()):
        raise BadInput(f"{path} is not a CIFAR file as published (an array without content); fetch the data set again")
    return found


def _screen(raw: bytes) -> None:
    memo = 0
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(f"it uses {opcode.name}")
        if opcode.name == "GLOBAL" and tuple(str(argument).split(" ", 1)) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {str(argument).replace(' ', '.')}")
        if opcode.name in _MEMO_OPCODES:
            memo += 1
            # the memo is an array as long as its highest index: a single opcode could ask for 32 GB
            if not isinstance(argument, int) or argument > memo + 16:
                raise pickle.UnpicklingError("its memo has gaps")


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _find(root: Path, folder: str, first: str) -> Path | None:
    return next((path for path in (root / folder, root) if (path / first).is_file()), None)


def find_cifar10(root: Path) -> Path | None:
    return _find(root, "cifar-10-batches-py", "data_batch_1")


def find_cifar100(root: Path) -> Path | None:
    return _find(root, "cifar-100-python", "train")


def load_cifar10(folder: Path) -> FederatedData:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    batches = [folder / f"data_batch_{k}" for k in range(1, 6)]
    return FederatedData(
        train=ImageSet(*_images(batches, b"labels"), mean, std),
        test=ImageSet(*_images([folder / "test_batch"], b"labels"), mean, std),
        name="cifar10", classes=10, augmentation="cifar",
        class_names=_names(folder / "batches.meta", b"label_names"),
    )  # fmt: skip


def load_cifar100(folder: Path) -> FederatedData:
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return FederatedData(
        train=ImageSet(*_images([folder / "train"], b"fine_labels"), mean, std),
        test=ImageSet(*_images([folder / "test"], b"fine_labels"), mean, std),
        name="cifar100", classes=100, augmentation="cifar", class_names=_names(folder / "meta", b"fine_label_names"),
    )  # fmt: skip


def _images(paths: list[Path], label_key: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [_batch(path, label_key) for path in paths]
    images = np.concatenate([data for data, _ in batches])  # the one copy
    labels = [label for _, own in batches for label in own]
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _batch(path: Path, label_key: bytes) -> tuple[np.ndarray, list[int]]:
    content = read_pickle(path)
    data, labels = content.get(b"data"), content.get(label_key)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        raise BadInput(f"{path} has no array of 3x32x32 images; fetch the data set again")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise BadInput(f"{path} has no list of labels under {label_key.decode()!r}; fetch the data set again")
    if len(labels) != len(data):
        raise BadInput(f"{path} has {len(data)} images but {len(labels)} labels; fetch the data set again")
    return data, labels


def _names(path: Path, key: bytes) -> tuple[str, ...]:
    """Names are for reading only; a folder without the meta file still trains."""
    if not path.is_file():
        return ()
    names = read_pickle(path).get(key)
    if not isinstance(names, list):
        return ()
    return tuple(name.decode("utf-8", "replace") for name in names if isinstance(name, bytes))
