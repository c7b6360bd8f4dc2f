"""The exported graphs of a model: from the cache of earlier starts if they are there, else from torch.export."""

from __future__ import annotations

from torch import nn

from strata.core import cache
from strata.graph import stored
from strata.graph.export import Exports, check_inputs, export_modes
from strata.graph.identity import identity
from strata.graph.inputs import InputSpec

FOLDER = "graphs"
MOST_BYTES = 256 << 20  # of all graphs together
LARGEST = 32 << 20  # of one


def cached_exports(model: nn.Module, inputs: InputSpec) -> Exports:
    folder = cache.private_folder(FOLDER)
    key = None if folder is None else identity(model, inputs)
    if folder is None or key is None:
        return _export(model, inputs)
    path = folder / key
    state = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    content = cache.read(path)
    if content is not None:
        try:
            found = stored.from_bytes(content, buffers)
        except Exception:
            found = None  # not what we write: as if it were not there
        if found is not None:
            cache.touch(path)
            return found
    found = _export(model, inputs)
    try:
        written = stored.to_bytes(found, buffers)
    except stored.NotStorable:
        return found
    if len(written) <= LARGEST:
        cache.write(path, written)
        cache.prune(folder, MOST_BYTES)
    return found


def _export(model: nn.Module, inputs: InputSpec) -> Exports:
    check_inputs(model, inputs)
    return export_modes(model, inputs)
