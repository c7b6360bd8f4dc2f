"""Starting values of channels that come into a growing part of a model: SLT's head at a step change.

published   as they were drawn at the beginning, for the whole model's fan-in
fan-in      the same, scaled to what they would be in a network of the new part's own width
zero        zero on the outgoing side: nobody hears of a new channel until that is trained
copies      each new channel is a copy of an old one, and what follows shares its weights out among them (Net2Net: Chen,
            Goodfellow, Shlens, ICLR 2016), by random shares, so that copies grow apart. A channel of a sum whose other
            operand was there before is no copy: zero on its outgoing side

The last two change nothing of what the part computes, where channels meet in weighted sums only (convolutions, linear
layers) and norms treat each for itself (batch norm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut


def filled(
    graph: ChannelGraph,
    fill: str,
    before: Cut | None,
    after: Cut,
    tensors: Mapping[str, Tensor],
    random: torch.Generator,
) -> dict[str, Tensor]:
    """New tensors where anything changes. `before`: the part that was trained so far; None: nothing was."""
    growth = Growth(graph, before or after, after)
    made: dict[str, Tensor] = {}
    if fill == "fan-in":
        made = _by_fan_in(graph, before, after, tensors)
    elif before is not None and fill == "zero":
        made = {name: growth.unheard(name, tensors[name]) for name in graph.output_dims}
    elif before is not None and fill == "copies":
        cut = [name for name in graph.state_shapes if any(ids is not None for ids in graph.channel_ids(name))]
        made = {name: growth.copied(name, tensors[name], random) for name in cut}
    return {name: made.get(name, tensor) for name, tensor in tensors.items()}


def _by_fan_in(graph: ChannelGraph, before: Cut | None, after: Cut, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Torch draws a layer's weights and biases within 1 / sqrt(fan-in)."""
    made = {}
    for weight, dim in graph.output_dims.items():
        shape = graph.state_shapes[weight]
        if dim != 0 or len(shape) < 2:  # an embedding, a transposed convolution
            continue
        factor = math.sqrt(math.prod(shape[1:]) / math.prod(after.shapes[weight][1:]))
        for name in (weight, weight.removesuffix("weight") + "bias"):
            if factor != 1 and name in tensors:
                new = _mask(after, name) if before is None else _mask(after, name) & ~_mask(before, name)
                made[name] = torch.where(new, tensors[name] * factor, tensors[name])
    return made


def _mask(cut: Cut, name: str) -> Tensor:
    """Which coordinates of the whole tensor the cut keeps."""
    mask = {name: torch.zeros(cut.full_shapes[list(cut.kept).index(name)], dtype=torch.bool)}
    cut.scatter(mask, {name: torch.ones(cut.shapes[name], dtype=torch.bool)})
    return mask[name]


@dataclass(frozen=True)
class Growth:
    """From one cut to one that holds it."""

    graph: ChannelGraph
    before: Cut
    after: Cut

    def unheard(self, name: str, weight: Tensor) -> Tensor:
        """The weight without what old outputs would hear from new inputs."""
        new = _mask(self.after, name) & ~_mask(self.before, name)
        rows = torch.zeros(weight.shape[self.graph.output_dims[name]], dtype=torch.bool)
        rows[self._kept(self.before, name, self.graph.output_dims[name])] = True
        return weight.masked_fill(new & self._along(name, self.graph.output_dims[name], rows), 0.0)

    def copied(self, name: str, tensor: Tensor, random: torch.Generator) -> Tensor:
        """Rows (and entries of norms and biases) copied; columns shared out among the copies of a channel."""
        made, output = tensor, self.graph.output_dims.get(name)
        for dim, ids in enumerate(self.graph.channel_ids(name)):
            if ids is None:
                continue
            origin = self._origins(name, dim, ids)
            taken = made.index_select(dim, torch.from_numpy(np.maximum(origin, 0)))
            if output is None or dim == output:
                there = torch.from_numpy(origin >= 0)
                made = torch.where(self._along(name, dim, there), taken, made)
            else:
                made = taken * self._shares(name, dim, origin, random).to(tensor.dtype)
        return torch.where(_mask(self.after, name), made, tensor)

    def _origins(self, name: str, dim: int, ids: np.ndarray) -> np.ndarray:
        """For each index where its values come from: itself if it is old, -1 if it is neither old nor a copy."""
        place: dict[tuple[int, int], int] = {}
        numbers = _occurrences(ids)
        for index, key in enumerate(zip(ids.tolist(), numbers, strict=True)):
            place[key] = index  # a channel may stand in several places of a flattened map
        origin = np.full(len(ids), -1, dtype=np.int64)
        old = self._kept(self.before, name, dim)
        known = set(old.tolist())
        origin[old] = old
        for index in self._kept(self.after, name, dim).tolist():
            source = self._image(int(ids[index])) if index not in known else None
            if source is not None:
                found = place.get((source, numbers[index]), -1)
                origin[index] = found if found in known else -1
        return origin

    def _shares(self, name: str, dim: int, origin: np.ndarray, random: torch.Generator) -> Tensor:
        """Of an input channel's weight that each of its copies gets: random, and together 1; without origin 0."""
        rows = self.graph.state_shapes[name][self.graph.output_dims[name]]
        draws = torch.rand((rows, len(origin)), generator=random, dtype=torch.float64) + 0.5
        draws[:, torch.from_numpy(origin < 0)] = 0.0
        group = torch.from_numpy(np.maximum(origin, 0))
        sums = torch.zeros_like(draws).index_add_(1, group, draws)
        shares = draws / sums[:, group].clamp(min=torch.finfo(torch.float64).tiny)
        view = [1] * len(self.graph.state_shapes[name])
        view[self.graph.output_dims[name]], view[dim] = shares.shape
        flat = shares if self.graph.output_dims[name] < dim else shares.T
        return flat.reshape(view)

    def _image(self, identity: int) -> int | None:
        """The old channel that a new one is a copy of. Of a sum: the sum of what its operands are copies of."""
        copies = [self._copies.get(leaf) for leaf in self.graph.leaves_of(identity)]
        if not copies or None in copies:
            return None
        return self.graph.channel_of(frozenset(leaf for leaf in copies if leaf is not None))

    @cached_property
    def _copies(self) -> dict[int, int | None]:
        """New leaf -> old leaf of the same weight: the row of channels once more from its beginning. None: two weights
        that share the channel disagree."""
        found: dict[int, int | None] = {}
        for name, dim in self.graph.output_dims.items():
            ids = self.graph.channel_ids(name)[dim]
            if ids is None:
                continue
            old = list(dict.fromkeys(ids[self._kept(self.before, name, dim)].tolist()))
            row = list(dict.fromkeys(ids.tolist()))
            there = set(ids[self._kept(self.after, name, dim)].tolist()) - set(old)
            for number, leaf in enumerate(row):
                if leaf in there:
                    source = old[number % len(old)]
                    found[leaf] = source if found.get(leaf, source) == source else None
        return found

    def _kept(self, cut: Cut, name: str, dim: int) -> np.ndarray:
        kept = cut.kept[name][dim]
        return np.arange(self.graph.state_shapes[name][dim]) if kept is None else np.array(kept, dtype=np.int64)

    def _along(self, name: str, dim: int, values: Tensor) -> Tensor:
        view = [1] * len(self.graph.state_shapes[name])
        view[dim] = len(values)
        return values.view(view)


def _occurrences(ids: np.ndarray) -> list[int]:
    """How many of the same id stand before each."""
    seen: dict[int, int] = {}
    numbers = []
    for identity in ids.tolist():
        numbers.append(seen.get(identity, 0))
        seen[identity] = numbers[-1] + 1
    return numbers
