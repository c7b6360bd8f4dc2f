"""What is known of a value in an exported graph before the model runs: sizes, of which some grow with the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AT = 2  # the batch at which a description has its plain sizes


@dataclass(frozen=True)
class BatchSize:
    """A size that depends on the batch: constant + per_sample * batch."""

    constant: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.constant + self.per_sample * batch

    def __str__(self) -> str:
        times = "batch" if self.per_sample == 1 else f"{self.per_sample}*batch"
        return f"{times} + {self.constant}" if self.constant else times


Size = int | BatchSize


class DescribedValue(Tensor):
    """A tensor without data. `shape` is a tuple of sizes, numbers and BatchSizes; the rest is as at a batch of two."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    sizes: tuple[Size, ...]

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DescribedValue([{', '.join(map(str, self.sizes))}], {self.dtype})"


def describe(sizes: tuple[Size, ...], dtype: torch.dtype) -> DescribedValue:
    plain = [size if isinstance(size, int) else size.at(AT) for size in sizes]
    found = torch.empty(plain, dtype=dtype, device="meta").as_subclass(DescribedValue)
    found.sizes = sizes
    return found


def described(value: Any) -> Any:
    """torch.export's own fake tensors (or lists of them) as DescribedValue; None for all else, such as sizes."""
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    if not isinstance(value, Tensor):
        return None
    return describe(tuple(map(_size, value.shape)), value.dtype)


def concrete_size(size: Any, batch: int) -> int:
    return size.at(batch) if isinstance(size, BatchSize) else int(size)


def _size(size: Any) -> Size:
    """Sizes are linear in the batch: read off at two and three samples."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    two, three = (int(expression.subs(dict.fromkeys(expression.free_symbols, batch))) for batch in (2, 3))
    return BatchSize(two - 2 * (three - two), three - two) if two != three else two
