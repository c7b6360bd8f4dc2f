"""Frozen weights in a mapped file instead of memory: clean pages, which the kernel drops when it needs the room and
reads again when they are used.

The file is private to the process and has no name: it goes with the process, however that ends. It lies in the folder
for temporary files (TMPDIR), which has to be on a disk for the room to be won. Buffers stay in memory: batch norms move
theirs.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from strata.core.errors import BadInput

ALIGNMENT = 64  # bytes, as torch's own allocator aligns


def check_mapping() -> None:
    if not hasattr(mmap, "MAP_SHARED") or not hasattr(os, "pwrite"):
        raise BadInput(
            "frozen weights in a mapped file need mmap as Linux and macOS have it: leave frozen_weights at memory here"
        )


def is_mapped(tensor: Tensor) -> bool:
    return getattr(tensor, "strata_mapped", False)


class MappedWeights:
    """Puts the frozen parameters of a module there, as they lie in memory; then only `write` can change them."""

    def __init__(self, module: nn.Module, folder: Path | None = None) -> None:
        check_mapping()
        frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad and one.numel()}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, parameter in frozen.items():
            self._offsets[name] = end
            end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        self.parameters, self._end, self._folder = frozen, end, folder
        if frozen:
            self._map()

    def _map(self) -> None:
        self._process = os.getpid()
        self._file = tempfile.TemporaryFile(dir=self._folder)
        self._file.truncate(self._end)
        mapped = mmap.mmap(self._file.fileno(), self._end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for name, parameter in self.parameters.items():
            self._put(name, parameter.detach())
            parameter.data = _tensor(mapped, parameter, self._offsets[name])
            parameter.strata_mapped = True  # type: ignore[attr-defined]

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def write(self, name: str, value: Tensor) -> None:
        """Other weights: through the file, as the mapping is read-only. What is the same is only read."""
        if torch.equal(self.parameters[name].detach(), value):
            return
        if self._process != os.getpid():  # forked since: the file is the parent's
            self._map()
        self._put(name, value)

    def _put(self, name: str, value: Tensor) -> None:
        parameter = self.parameters[name]
        laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        laid_out.copy_(value)
        flat = laid_out.as_strided((laid_out.numel(),), (1,)).view(torch.uint8)
        view = memoryview(flat.numpy().data)
        written, offset = 0, self._offsets[name]
        while written < len(view):
            written += os.pwrite(self._file.fileno(), view[written:], offset + written)


def _tensor(mapped: mmap.mmap, like: Tensor, offset: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to is what we want
        flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, like.stride())
