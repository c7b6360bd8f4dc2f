"""Convolutions of narrow networks in C (convolution.c), built once per machine with its C compiler and kept.

Without a compiler there are none, and cohorts run as grouped convolutions of torch: slower, and other float32 rounding.
So whether a run uses them is decided once, where it begins, and recorded in config.json.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.errors import BadInput

SOURCE = Path(__file__).with_name("convolution.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
LANES = 16  # samples in a register: batches must be a multiple of it
COMPILERS = ("gcc", "clang", "cc")
SECONDS = 120  # for building; it takes about two


class Convolution(torch.autograd.Function):
    """input [networks, in, h, w, batch], weights [networks, out, in, kh, kw] -> [networks, out, h', w', batch]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, stride: int, padding: int) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        networks, channels, height, width, batch = x.shape
        out, kernel_h, kernel_w = weights.shape[1], *weights.shape[3:]
        out_h, out_w = ((s + 2 * padding - k) // stride + 1 for s, k in ((height, kernel_h), (width, kernel_w)))
        shape = (networks, channels, height, width, out, out_h, out_w, batch, kernel_h, kernel_w, stride, padding)
        output = x.new_empty(networks, out, out_h, out_w, batch)
        _call("forward", output, x, weights, shape)
        ctx.save_for_backward(x, weights)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights = ctx.saved_tensors
        above = gradients[0].contiguous()
        of_x = of_weights = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            _call("input_gradient", of_x, above, weights, ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weights = torch.empty_like(weights)
            _call("weight_gradient", of_weights, above, x, ctx.shape)
        return of_x, of_weights, None, None


def convolution(x: Tensor, weights: Tensor, stride: int, padding: int) -> Tensor:
    result: Tensor = Convolution.apply(x, weights, stride, padding)
    return result


def available() -> bool:
    return _library() is not None


def require() -> None:
    """For whoever is told that the run has them."""
    if not available():
        raise BadInput(
            "this run uses convolutions written in C, and no C compiler that works (gcc, clang or cc) is on this "
            "machine: install one, or begin a run with --kernels off"
        )


def _call(name: str, result: Tensor, first: Tensor, second: Tensor, shape: tuple[int, ...]) -> None:
    library = _library()
    assert library is not None
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (result, first, second))
    if not getattr(library, name)(*pointers, (ctypes.c_int * len(shape))(*shape)):
        raise MemoryError(f"no memory for the sums of {name}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata" / "kernels"
    key = hashlib.sha256(repr((SOURCE.read_bytes(), FLAGS, compiler, _processor())).encode()).hexdigest()[:16]
    path = folder / f"convolution-{key}.so"
    try:
        if not path.exists():
            if compiler is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(compiler: str, path: Path) -> None:
    """Whole or not at all: other processes may build the same at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so.part")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", temporary, str(SOURCE)]
        subprocess.run(command, check=True, timeout=SECONDS, stdin=subprocess.DEVNULL, capture_output=True)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _processor() -> str:
    """Code for one processor need not run on another; a home folder may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
