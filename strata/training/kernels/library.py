"""The C sources of this folder, built once per machine with its C compiler and kept (core/cache.py)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from strata.core.cache import private_folder, read_own
from strata.core.errors import BadInput
from strata.core.processor import processor_abilities

SOURCES = tuple(Path(__file__).with_name(name) for name in ("narrow.c", "winograd.c"))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
LANES = 16  # floats in the widest registers; the sources take 8 at a time where there are none so wide
COMPILERS = ("gcc", "clang", "cc")
DIGEST = 32  # bytes of SHA-256
SECONDS = 120  # for building; it takes about three


def available() -> bool:
    return isinstance(library(), ctypes.CDLL)


def require() -> None:
    """For whoever is told that the run has them."""
    found = library()
    if not isinstance(found, ctypes.CDLL):
        raise BadInput(
            f"this run uses convolutions written in C, and they cannot be built on this machine ({found}): mend that, "
            "or begin a run with --kernels off"
        )


def loaded() -> ctypes.CDLL:
    found = library()
    assert isinstance(found, ctypes.CDLL), "asked for without being available"
    return found


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """Or why there is none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    kept = private_folder("kernels")
    try:
        # without a cache, for this process alone: what is loaded stays when its file goes
        with tempfile.TemporaryDirectory(prefix="strata-") if kept is None else nullcontext(kept) as folder:
            found = _loaded_from(Path(folder), compiler)
    except OSError as error:
        return str(error)
    except subprocess.SubprocessError as error:
        return f"the C compiler {compiler} does not build them: {error}"
    if found is None:
        return f"there is no C compiler: {', '.join(COMPILERS[:-1])} or {COMPILERS[-1]}"
    found.winograd.restype = found.winograd_weight_gradient.restype = None
    found.winograd_room.restype = ctypes.c_long
    return found


def _loaded_from(folder: Path, compiler: str | None) -> ctypes.CDLL | None:
    content = [source.read_bytes() for source in SOURCES]
    # code for one processor need not run on another, and a home folder may be shared
    key = hashlib.sha256(repr((content, FLAGS, compiler, processor_abilities())).encode()).hexdigest()[:16]
    path = folder / f"convolutions-{key}.so"
    if not _is_whole(path):
        if compiler is None:
            return None
        _build(compiler, path)
    return ctypes.CDLL(str(path))


def _is_whole(path: Path) -> bool:
    """Nobody else's, and with its checksum at the end: loading what is cut short ends the process by a signal. The
    loader of the system does not look at what follows a library."""
    content = read_own(path)
    return content is not None and hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _build(compiler: str, path: Path) -> None:
    """Whole or not at all: other processes may build the same at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so.part")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", temporary, *map(str, SOURCES)]
        subprocess.run(command, check=True, timeout=SECONDS, stdin=subprocess.DEVNULL, capture_output=True)
        with open(temporary, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
