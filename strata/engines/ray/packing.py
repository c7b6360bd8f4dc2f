"""The program without its large tensors, which are named by what is in them (SHA-256).

So a node that has the data set on disk loads it there and knows that it is the same; only what no file there holds
travels, once to each node.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.engines import wire
from strata.engines.ray.cluster import import_ray

Arrays = dict[str, tuple[np.ndarray, torch.dtype]]  # by digest


def pack(program: Any) -> tuple[bytes, Arrays]:
    """Classes and functions of the user's own script travel inside, as Ray sends them; others are imported there."""
    import_ray()
    from ray import cloudpickle

    arrays: Arrays = {}
    digests: dict[int, tuple[str, Tensor]] = {}  # the tensor too: what is known by its id must not go before the end

    class Packer(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if not wire.is_plain(obj) or 0 in obj.stride() or obj.numel() * obj.element_size() < wire.LARGE:
                return None
            if id(obj) not in digests:
                digest, array = _digested(obj)
                digests[id(obj)] = digest, obj
                arrays[digest] = array, obj.dtype
            return digests[id(obj)][0]

        def reducer_override(self, obj: Any) -> Any:
            return wire.reduced(obj) if wire.is_plain(obj) else super().reducer_override(obj)

    buffer = io.BytesIO()
    Packer(buffer, protocol=5).dump(program)
    return buffer.getvalue(), arrays


def unpack(data: bytes, arrays: Mapping[str, tuple[np.ndarray, torch.dtype]]) -> Any:
    """Tensors are views of the arrays, which lie in memory that the node's processes share: not to be written to."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, digest: str) -> Tensor:
            array, dtype = arrays[digest]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "not writable"
                return torch.from_numpy(array).view(dtype)

    return Unpacker(io.BytesIO(data)).load()


def _digested(tensor: Tensor) -> tuple[str, np.ndarray]:
    array = tensor.contiguous()
    values = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    name = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    digest = hashlib.sha256(name)
    digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest(), values
