"""What every loader needs: find and read files, and keep decoded images so that the next load is quick."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from strata.core.errors import BadInput, one_line
from strata.core.paths import expanded

LARGEST_MEMBER = 4 << 30  # bytes of an array in an archive; ImageNet64's have 1.6 GB
Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, tuple[int, ...], type], np.ndarray]  # name, shape, dtype


def default_root() -> Path:
    """Where data sets are kept unless a folder is named: $STRATA_DATA, else ~/.cache/strata/data."""
    return expanded(os.environ.get("STRATA_DATA") or "~/.cache/strata/data")


def first_existing(candidates: Iterable[Path]) -> Path | None:
    return next((path for path in candidates if path.exists()), None)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; the data set is incomplete, fetch it again") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error


def read_npz(path: Path, names: Iterable[str], what: str, most: int = LARGEST_MEMBER) -> Arrays:
    """These arrays of an archive, none of which takes more bytes than `most`, whatever it inflates to."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {name: archive.getinfo(f"{name}.npy").file_size for name in names}
        for name, size in sizes.items():
            if size > most:
                raise BadInput(f"{path}: {name} has {size} bytes, more than the {most} that are read")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in sizes}
    except BadInput:
        raise
    except Exception as error:  # encrypted, cut short, of another kind, or of a shape that no memory holds
        raise BadInput(f"{path} is not a whole {what} ({one_line(error)}); fetch the data set again") from error


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Loaders name their own troubles; what is left is a folder that may not be read, or no name for one."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or place} cannot be read: {error.strerror or error}") from error


def fingerprint(root: Path, paths: Iterable[Path], version: str) -> str:
    """Changes when a file is added, removed or rewritten, not when root moves. `version` names the decoding."""
    digest = hashlib.sha256(version.encode())
    for path in paths:
        status = path.stat()
        line = f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))  # a name need not be UTF-8
    return digest.hexdigest()[:24]


def decoded_once(root: Path, key: str, decode: Callable[[Allocate], Arrays]) -> Arrays:
    """The arrays of `decode(allocate)`, kept in root/.strata-decoded/KEY and memory-mapped from there the next time.

    Memory-mapped pages are shared by all processes and cost no memory of their own; `allocate` hands out arrays that
    already lie in files, so that decoding more than fits into memory works too. Where the folder cannot be written, or
    has no room, the arrays are plain ones and nothing is kept.
    """
    folder = root / ".strata-decoded" / key
    with contextlib.suppress(OSError, ValueError):
        return _map(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder.parent))
    except OSError:
        return decode(_in_memory)
    try:
        arrays = decode(lambda name, shape, dtype: _in_file(scratch / f"{name}.npy", shape, dtype))
        try:
            for name, array in arrays.items():
                if isinstance(array, np.memmap):
                    array.flush()
                else:
                    np.save(scratch / f"{name}.npy", array, allow_pickle=False)
            (scratch / "shapes.json").write_text(json.dumps({name: array.shape for name, array in arrays.items()}))
            with contextlib.suppress(OSError, ValueError):
                return _map(folder)  # another process was quicker
            shutil.rmtree(folder, ignore_errors=True)  # a broken one
            scratch.rename(folder)
            return _map(folder)
        except (OSError, ValueError):
            return arrays  # open mappings outlive their files' names
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _in_memory(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.empty(shape, dtype=dtype)


def _in_file(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    try:
        array: np.ndarray = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        with path.open("r+b") as file:  # a full disk must show here: later it would be a bus error
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array
    except (OSError, ValueError):  # ValueError: nothing to map in an empty array
        return np.empty(shape, dtype=dtype)


def _map(folder: Path) -> Arrays:
    shapes = json.loads((folder / "shapes.json").read_text())
    arrays: Arrays = {}
    for name, shape in shapes.items():
        # copy on write: torch wants writable memory, and a write must never reach the file
        arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        if list(arrays[name].shape) != shape:
            raise ValueError(f"{folder}: {name} has changed")
    return arrays
