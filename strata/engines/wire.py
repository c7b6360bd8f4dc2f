"""Messages between the server process and its own workers (private pipes; nothing from outside is ever read here).

A Cut is sent to each worker once and then referred to by its hash; tensors travel as plain arrays. The program's large
tensors (the data set) do not travel at all: they lie in memory that all processes share.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from strata.engines.shared_memory import SharedBlock

LARGE = 1 << 20  # bytes
KEPT = 64  # Cuts a worker remembers: enough for every step of a plan's round, bounded for random cuts


def _tensor(array: Any, dtype: torch.dtype | None) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


def is_plain(obj: Any) -> bool:
    """A tensor of the CPU that is only values. Parameters stay Parameters."""
    return type(obj) is Tensor and not obj.requires_grad and obj.device.type == "cpu"


def reduced(obj: Tensor) -> Any:
    """A plain tensor as arrays, for pickle."""
    repeated = [stride == 0 and size > 1 for stride, size in zip(obj.stride(), obj.shape, strict=True)]
    if any(repeated):  # an expanded view (grey images): its own bytes only
        own = obj[tuple(slice(0, 1) if again else slice(None) for again in repeated)]
        return Tensor.expand, (own.clone(memory_format=torch.contiguous_format), obj.shape)
    tensor = obj.contiguous()
    if tensor.dtype == torch.bfloat16:
        return _tensor, (tensor.view(torch.int16).numpy(), torch.bfloat16)
    return _tensor, (tensor.numpy(), None)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: tuple[type, ...], known: MutableMapping[str, Any] | None) -> None:
        super().__init__(file, protocol=5)
        self._shared, self._known = shared, known
        self.fresh: dict[str, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        if self._known is None or not isinstance(obj, self._shared):
            return None
        key: str = obj.hash  # type: ignore[attr-defined]
        if key not in self._known:
            self.fresh[key] = obj
        return key

    def reducer_override(self, obj: Any) -> Any:
        if is_plain(obj):
            return reduced(obj)
        if isinstance(obj, self._shared) and is_dataclass(obj):  # its fields only, not what it has cached
            return type(obj), tuple(getattr(obj, field.name) for field in fields(obj))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._load = load

    def persistent_load(self, pid: Any) -> Any:
        return self._load(pid)


def dump(message: Any, shared: tuple[type, ...] = ()) -> bytes:
    """Everything by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, shared, None).dump(message)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return pickle.loads(data)


class _ProgramPickler(_Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, (), None)
        self.blocks: list[SharedBlock] = []
        self._places: dict[int, int] = {}
        self._alive: list[Tensor] = []  # what is referred to by its id must not go before the end

    def persistent_id(self, obj: Any) -> Any:
        if not is_plain(obj) or 0 in obj.stride():
            return None
        if obj.numel() * obj.element_size() < LARGE:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.blocks)
            self._alive.append(obj)
            self.blocks.append(SharedBlock.holding({"": obj}))
        return self._places[id(obj)]


def dump_program(program: Any) -> tuple[bytes, list[SharedBlock]]:
    """The program, and the blocks its large tensors were copied to."""
    buffer = io.BytesIO()
    pickler = _ProgramPickler(buffer)
    pickler.dump(program)
    return buffer.getvalue(), pickler.blocks


def load_program(data: bytes, blocks: Sequence[SharedBlock]) -> Any:
    return _Unpickler(io.BytesIO(data), lambda place: blocks[place].tensors[""]).load()


class Sender:
    """Remembers what the other end already has."""

    def __init__(self, shared: tuple[type, ...]) -> None:
        self._shared = shared
        self._known: dict[str, Any] = {}

    def dump(self, message: Any) -> bytes:
        forget = len(self._known) > KEPT
        if forget:
            self._known.clear()
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._shared, self._known)
        pickler.dump(message)
        self._known.update(dict.fromkeys(pickler.fresh))
        return dump((forget, pickler.fresh, buffer.getvalue()), self._shared)


class Receiver:
    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def load(self, data: bytes) -> Any:
        forget, fresh, body = load(data)
        if forget:
            self._known.clear()
        self._known.update(fresh)
        return _Unpickler(io.BytesIO(body), self._known.__getitem__).load()
