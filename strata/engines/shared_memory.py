"""A block of memory that several processes see: the server's tensors of the round, and the data set.

The block has no name in any file system, so nothing is left behind when processes are killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True)
class TensorPlace:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class BlockLayout:
    entries: tuple[TensorPlace, ...]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> BlockLayout:
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entries.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), offset))
            size = tensor.numel() * tensor.element_size()
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), max(offset, ALIGNMENT))


class SharedBlock:
    """`tensors` are views into it. `fd` can be handed to another process, which opens SharedBlock(layout, fd)."""

    def __init__(self, layout: BlockLayout, fd: int | None = None) -> None:
        self.layout = layout
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, layout.size)
        self.fd = fd
        self._map = mmap.mmap(fd, layout.size)
        self.tensors: dict[str, Tensor] = {}
        for entry in layout.entries:
            count = 1
            for extent in entry.shape:
                count *= extent
            flat = (
                torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.offset)
                if count
                else torch.empty(0, dtype=entry.dtype)
            )
            self.tensors[entry.name] = flat.view(entry.shape)

    @classmethod
    def holding(cls, tensors: Mapping[str, Tensor]) -> SharedBlock:
        block = cls(BlockLayout.of(tensors))
        block.write(tensors)
        return block

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, view in self.tensors.items():
            view.copy_(tensors[name])

    def close(self) -> None:
        """Gives up the descriptor; the memory goes when the last view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("strata")
    with tempfile.TemporaryFile() as file:  # systems without memfd: an unlinked file
        return os.dup(file.fileno())
