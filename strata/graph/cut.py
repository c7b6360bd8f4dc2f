"""Cut: which part of a model a device gets, as a value. It is what a server sends a device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from strata.core.errors import BadInput, one_line

Kept = tuple[int, ...] | None  # sorted indices along one dim; None = all
FORMAT = 1


@dataclass(frozen=True)
class Cut:
    """Kept indices per dim of every parameter and buffer, and the names of frozen parameters.

    `entries` has one (name, kept per dim) for each state entry in state order, `full_shapes` the uncut shapes. With an
    `output` it holds only what this one of the model's outputs needs (ChannelGraph.for_output).
    """

    graph_hash: str
    entries: tuple[tuple[str, tuple[Kept, ...]], ...]
    full_shapes: tuple[tuple[int, ...], ...]
    parameters: frozenset[str]
    frozen: frozenset[str]
    output: str | None = None  # None: the first, and all that others need is there too

    def __post_init__(self) -> None:
        unknown = self.frozen - self.parameters
        if unknown:
            raise BadInput(f"the cut freezes {min(unknown)}, which is not a parameter of the model.")

    @cached_property
    def kept(self) -> dict[str, tuple[Kept, ...]]:
        return dict(self.entries)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.entries if name in self.parameters and name not in self.frozen)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(size if k is None else len(k) for k, size in zip(kept, shape, strict=True))
            for (name, kept), shape in zip(self.entries, self.full_shapes, strict=True)
        }

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _hash_value(self) -> int:
        return hash((self.graph_hash, self.entries, self.frozen, self.output))

    def __hash__(self) -> int:
        return self._hash_value

    # --- moving tensors ----------------------------------------------------------------------------------------

    def extract(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The submodel's own copy of its parameters and buffers."""
        return {name: self.extract_one(name, state[name]) for name, _ in self.entries}

    def extract_one(self, name: str, tensor: Tensor) -> Tensor:
        for dim, kept in enumerate(self.kept[name]):
            if kept is not None:
                tensor = _take(tensor, dim, kept)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def scatter(self, state: dict[str, Tensor], update: Mapping[str, Tensor]) -> None:
        """state[kept] = update, in place."""
        for name, values in update.items():
            self._check(name, values)
            state[name][self._blocks[name]] = values

    def scatter_add(self, sums: dict[str, Tensor], counts: dict[str, Tensor], update: Mapping[str, Tensor],
                    weight: float = 1) -> None:  # fmt: skip
        """sums[kept] += weight * update and counts[kept] += weight: a running mean per coordinate."""
        for name, values in update.items():
            self._check(name, values)
            index = self._blocks[name]
            sums[name][index] += values if weight == 1 else values * weight
            counts[name][index] += weight

    def _check(self, name: str, values: Tensor) -> None:
        if name not in self.shapes or tuple(values.shape) != self.shapes[name]:
            expected = self.shapes.get(name, "no such entry")
            raise BadInput(f"the update for {name} has shape {tuple(values.shape)}; the cut says {expected}.")

    @cached_property
    def _blocks(self) -> dict[str, tuple[Any, ...]]:
        return {name: _block(k, shape) for (name, k), shape in zip(self.entries, self.full_shapes, strict=True)}

    # --- cuts of cuts ------------------------------------------------------------------------------------------

    def within(self, outer: Cut) -> Cut:
        """The same part in the coordinates of outer's submodel; every kept index must be in outer."""
        entries = []
        for name, kept in self.entries:
            if name not in outer.kept:
                raise BadInput(f"the inner cut keeps {name}, which the outer cut does not have.")
            around = outer.kept[name]
            entries.append((name, tuple(_relative(k, o, name) for k, o in zip(kept, around, strict=True))))
        shapes = tuple(outer.shapes[name] for name, _ in self.entries)
        return replace(self, entries=tuple(entries), full_shapes=shapes)

    def with_frozen(self, frozen: frozenset[str]) -> Cut:
        return replace(self, frozen=frozen)

    # --- as text -----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "graph": self.graph_hash,
            "frozen": sorted(self.frozen),
            **({"output": self.output} if self.output is not None else {}),
            "entries": [
                {
                    "name": name,
                    "shape": list(shape),
                    "parameter": name in self.parameters,
                    "kept": [None if k is None else _runs(k) for k in kept],
                }
                for (name, kept), shape in zip(self.entries, self.full_shapes, strict=True)
            ],
        }

    @staticmethod
    def from_json(value: Any) -> Cut:
        try:
            if value["format"] != FORMAT:
                raise BadInput(f"the cut is of format {value['format']}; this Strata reads format {FORMAT}.")
            entries, shapes, parameters = [], [], set()
            for entry in value["entries"]:
                name, shape = str(entry["name"]), tuple(int(size) for size in entry["shape"])
                kept = tuple(
                    None if runs is None else _unruns(runs, size, name)
                    for runs, size in zip(entry["kept"], shape, strict=True)
                )
                entries.append((name, kept))
                shapes.append(shape)
                if entry["parameter"] is True:
                    parameters.add(name)
            if len({name for name, _ in entries}) != len(entries):
                raise BadInput("the cut names an entry twice.")
            frozen = frozenset(str(name) for name in value["frozen"])
            output = value.get("output")
            output = None if output is None else str(output)
            return Cut(str(value["graph"]), tuple(entries), tuple(shapes), frozenset(parameters), frozen, output)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"this is not a cut in JSON form: {one_line(error, kind=True)}.") from error


def _take(tensor: Tensor, dim: int, kept: tuple[int, ...]) -> Tensor:
    run = _as_run(kept)
    if run is not None:
        return tensor.narrow(dim, run[0], run[1] - run[0])
    return tensor.index_select(dim, torch.tensor(kept, device=tensor.device))


def _block(kept: tuple[Kept, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index that selects the kept block: slices where the indices are runs, else tensors that broadcast."""
    runs = [(0, None) if k is None else _as_run(k) for k in kept]
    scattered = [dim for dim, run in enumerate(runs) if run is None]
    if len(scattered) <= 1:  # one index tensor among slices keeps its place, so the block keeps its shape
        return tuple(torch.tensor(k) if run is None else slice(*run) for k, run in zip(kept, runs, strict=True))
    rank = scattered[-1] + 1  # several would move to the front, unless every dim up to the last one is a tensor
    indices = [torch.tensor(kept[dim] if kept[dim] is not None else range(shape[dim])) for dim in range(rank)]
    return tuple(index.view([-1 if d == dim else 1 for d in range(rank)]) for dim, index in enumerate(indices))


def _relative(kept: Kept, around: Kept, name: str) -> Kept:
    if around is None:
        return kept
    place = {index: position for position, index in enumerate(around)}
    if kept is None or any(index not in place for index in kept):
        raise BadInput(f"the inner cut keeps channels of {name} that the outer cut does not have.")
    return None if len(kept) == len(around) else tuple(place[index] for index in kept)


def _as_run(kept: tuple[int, ...]) -> tuple[int, int] | None:
    """(start, stop) if the indices are consecutive."""
    return (kept[0], kept[-1] + 1) if kept and kept[-1] - kept[0] + 1 == len(kept) else None


def _runs(kept: tuple[int, ...]) -> list[list[int]]:
    runs: list[list[int]] = []
    for index in kept:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return runs


def _unruns(runs: Any, size: int, name: str) -> tuple[int, ...]:
    kept: list[int] = []
    last = 0
    for run in runs:
        start, stop = int(run[0]), int(run[1])
        if not last <= start < stop <= size:
            raise BadInput(f"the cut keeps {start}..{stop - 1} of {name}, out of order or beyond its {size} channels.")
        kept.extend(range(start, stop))
        last = stop
    if not kept:
        raise BadInput(f"the cut keeps no channel of {name}.")
    return tuple(kept)
